"""Device profiles and the quick measurement."""

import pytest

from sparroll.errors import UserError
from sparroll.plan.cost import KINETICS_INTENSITY
from sparroll.plan.hardware import PROFILES, find_hardware, measure


def test_profiles_by_name_in_any_case():
    assert list(PROFILES) == ["A100", "H100", "H200", "B200", "MI300X"]
    assert find_hardware("h200").bandwidth_bytes_per_second == 4.8e12
    assert find_hardware("mi300x") is PROFILES["MI300X"]


def test_kinetics_intensity_is_a_b200():
    assert find_hardware("B200").intensity() == KINETICS_INTENSITY
    assert find_hardware("B200").intensity(element_bytes=1) == KINETICS_INTENSITY / 2


def test_unknown_hardware_names_the_nearest():
    with pytest.raises(UserError, match="unknown hardware 'H20'\nhint: did you mean 'H200'"):
        find_hardware("H20")


def test_a_measured_machine_can_be_saved_and_named(tmp_path):
    machine = measure("cpu")
    assert 1e8 < machine.bandwidth_bytes_per_second < 1e13
    assert 1e8 < machine.flops_per_second < 1e15
    assert machine.dtype == "float32"
    assert find_hardware(machine.save(tmp_path / "here.json")) == machine


@pytest.mark.parametrize("text", ["{", '{"name": "x"}', '{"name": "x", "flops_per_second": 1, "speed": 2}'])
def test_a_broken_hardware_file_is_refused(tmp_path, text):
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(UserError, match="is not a hardware file"):
        find_hardware(path)


def test_a_hardware_file_with_senseless_numbers_is_refused(tmp_path):
    path = tmp_path / "x.json"
    path.write_text('{"name": "x", "flops_per_second": 1, "bandwidth_bytes_per_second": 0, "memory_bytes": 1}')
    with pytest.raises(UserError, match="bandwidth_bytes_per_second of hardware 'x' must be positive, got 0"):
        find_hardware(path)
    path.write_text('{"name": 7, "flops_per_second": 1, "bandwidth_bytes_per_second": 1, "memory_bytes": 1}')
    with pytest.raises(UserError, match="name of hardware must be text, got 7"):
        find_hardware(path)
