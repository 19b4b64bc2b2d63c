"""Device profiles and the quick measurement."""

import json
import math

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


@pytest.mark.parametrize(
    "text", ["{", '{"name": "x"}', '{"name": "x", "flops_per_second": 1, "speed": 2}', "[1]", "1" * 5000]
)
def test_a_broken_hardware_file_is_refused(tmp_path, text):
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(UserError, match="is not a hardware file"):
        find_hardware(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bandwidth_bytes_per_second": 0}, "bandwidth_bytes_per_second of hardware 'x' must be positive and finite, got 0"),
        ({"memory_bytes": 10**400}, "memory_bytes of hardware 'x' must be positive and finite, got 1000"),
        ({"memory_bytes": math.inf}, "memory_bytes of hardware 'x' must be positive and finite, got inf"),
        ({"memory_bytes": math.nan}, "memory_bytes of hardware 'x' must be positive and finite, got nan"),
        ({"flops_per_second": True}, r"(?s)flops_per_second of .*, got True\nhint: an H200 has"),
        ({"flops_per_second": "9"}, "flops_per_second of hardware 'x' must be positive and finite, got '9'"),
        ({"processors": 0.5}, r"(?s)processors of hardware 'x' must be a whole number from 1 on, got 0.5\nhint: an H200"),
        ({"processors": True}, "processors of hardware 'x' must be a whole number from 1 on, got True"),
        ({"processors": 0}, "processors of hardware 'x' must be a whole number from 1 on, got 0"),
        ({"name": 7}, "name of hardware must be text, got 7"),
        ({"dtype": 3}, "dtype of hardware must be text, got 3"),
        ({"source": None}, "source of hardware must be text, got None"),
    ],
)  # fmt: skip
def test_a_hardware_file_with_senseless_fields_is_refused(tmp_path, change, message):
    path = tmp_path / "x.json"
    fields = {"name": "x", "flops_per_second": 1, "bandwidth_bytes_per_second": 1, "memory_bytes": 1}
    path.write_text(json.dumps(fields))
    assert find_hardware(path).name == "x"
    path.write_text(json.dumps(fields | change))
    with pytest.raises(UserError, match=message):
        find_hardware(path)
