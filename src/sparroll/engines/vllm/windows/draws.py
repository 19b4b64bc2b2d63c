"""What a request draws from: its logits after temperature and top-p, and a token of them at a uniform number that it has
had since it began. On a GPU a pair of kernels draws from logits, without a copy of them."""

# N rows, R requests of a step, V vocabulary, B blocks of it, X tokens in a block

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sparroll.engines import sampling

_BLOCKS, _WIDTH = 128, 512


def has_kernel(on_device: Tensor, top_p: np.ndarray) -> bool:
    """A top-p makes distributions that the kernels do not; they take PyTorch's operators, as on a CPU."""
    return on_device.is_cuda and not (top_p < 1).any()


@dataclass(frozen=True)
class Tempers:
    """How each request of a step turns logits into the distribution that it draws from."""

    temperature_R: np.ndarray
    """0 is greedy."""
    top_p_R: np.ndarray
    heat_R1: Tensor
    """What logits are divided by, on the device; 1 for greedy requests."""
    greedy_R: Tensor

    @staticmethod
    def of(
        temperatures: Sequence[float], top_ps: Sequence[float], to_device: Callable[[np.ndarray], Tensor]
    ) -> Tempers:
        """to_device: copies an array to the device."""
        temperature_R = np.array(temperatures, dtype=np.float64)
        heat_R = np.where(temperature_R == 0, 1.0, temperature_R).astype(np.float32)
        return Tempers(
            temperature_R,
            np.array(top_ps, dtype=np.float64),
            to_device(heat_R)[:, None],
            to_device(temperature_R == 0),
        )

    def log_probs(self, logits_NV: Tensor, request_N: np.ndarray, on_device_N: Tensor) -> Tensor:
        """[N, V] float32 log-probabilities after temperature and top-p. request_N: whose row each is, on the host and on
        the device."""
        logp_NV = torch.log_softmax(self._heated(logits_NV, on_device_N), dim=-1, dtype=torch.float32)
        for row in np.flatnonzero(self.top_p_R[request_N] < 1):
            logp_NV[row] = sampling.log_probs(logp_NV[row], 1.0, float(self.top_p_R[request_N[row]]))
        return logp_NV

    def probabilities(self, logits_NV: Tensor, request_N: np.ndarray, on_device_N: Tensor) -> Tensor:
        """The same as probabilities, with fewer passes over the memory."""
        if (self.top_p_R[request_N] < 1).any():
            return self.log_probs(logits_NV, request_N, on_device_N).exp_()
        return torch.softmax(self._heated(logits_NV, on_device_N), dim=-1, dtype=torch.float32)

    def _heated(self, logits_NV: Tensor, on_device_N: Tensor) -> Tensor:
        if np.isin(self.temperature_R, (0, 1)).all():
            return logits_NV
        return logits_NV.float() / self.heat_R1[on_device_N]

    def draw_of_logits(
        self, logits_NV: Tensor, uniform_N: Tensor, request_N: np.ndarray, on_device_N: Tensor
    ) -> Tensor:
        """[N] int64: `draw` from the probabilities that these logits give, without writing them where there is a kernel. One
        row with a top-p takes the operators for all."""
        if has_kernel(logits_NV, self.top_p_R[request_N]):
            from sparroll.engines.vllm.windows.triton_draws import draw_of_logits

            return draw_of_logits(logits_NV, on_device_N, self.heat_R1[:, 0], self.greedy_R, uniform_N)
        mass_NV = self.probabilities(logits_NV, request_N, on_device_N)
        return self.draw(mass_NV, uniform_N, request_N, on_device_N)

    def draw(self, mass_NV: Tensor, uniform_N: Tensor, request_N: np.ndarray, on_device_N: Tensor) -> Tensor:
        """[N] int64: a token for each row, drawn from these probabilities at `uniform_N`, or the most likely one."""
        greedy = self.temperature_R[request_N] == 0
        if greedy.all():
            return mass_NV.argmax(-1)
        drawn_N = draw(mass_NV, uniform_N)
        return torch.where(self.greedy_R[on_device_N], mass_NV.argmax(-1), drawn_N) if greedy.any() else drawn_N


def draw(mass_NV: Tensor, uniform_N: Tensor) -> Tensor:
    """[N] what `sampling.sample` draws, up to the last bits of the sums: first a block of the vocabulary, then a token
    in it. A cumulative sum over the whole vocabulary takes as long as a decode step on a GPU."""
    vocabulary = mass_NV.shape[-1]
    # Published vocabularies are multiples of 128. Others are filled up, which takes a copy.
    width = vocabulary // _BLOCKS if vocabulary % _BLOCKS == 0 else _WIDTH
    blocks = -(-vocabulary // width)
    if blocks * width > vocabulary:
        mass_NV = torch.nn.functional.pad(mass_NV, (0, blocks * width - vocabulary))
    mass_NBX = mass_NV.unflatten(-1, (blocks, width))
    ends_NB = mass_NBX.sum(-1, dtype=torch.float64).cumsum(-1)
    aim_N1 = uniform_N[:, None] * ends_NB[:, -1:]
    block_N1 = torch.searchsorted(ends_NB, aim_N1, right=True).clamp_max(blocks - 1)
    before_N1 = ends_NB.gather(-1, (block_N1 - 1).clamp_min(0)) * (block_N1 > 0)
    inside_NX = mass_NBX.gather(1, block_N1[:, :, None].expand(-1, 1, width))[:, 0].double().cumsum(-1)
    place_N1 = torch.searchsorted(inside_NX, aim_N1 - before_N1, right=True).clamp_max(width - 1)
    return (block_N1 * width + place_N1)[:, 0].clamp_max(vocabulary - 1)
