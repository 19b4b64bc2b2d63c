"""How good a model is at the task without sampling: what it gives the right tokens of right responses, by role."""

# B problems, T response tokens, V vocabulary, E entries

from __future__ import annotations

import torch
from lean_qwen3 import hidden_states, logits
from table_sums import FIRST_NAME, Role, Shape
from torch import Tensor
from transformers import Qwen3ForCausalLM

ROLE_NAMES = {
    Role.FORM: "form",
    Role.HEADER: "header",
    Role.OPERAND: "operand",
    Role.DIGIT: "lookup",
    Role.TOTAL: "sum",
    Role.ANSWER: "answer",
}


@torch.no_grad()
def skill(model: Qwen3ForCausalLM, shape: Shape, ids_BS: Tensor, temperature: float = 1.0) -> dict[str, float]:
    """Per role the mean probability of going wrong at one token, and `right`, the chance that a whole response is right.

    An operand is right if it is one of its group that was not taken yet, a remark if it is a name. `right` is the mean
    over problems of the product over tokens, as if sampled responses went on as the given ones do.
    """
    at = shape.prompt_tokens - 1
    hidden = hidden_states(model, ids_BS)[:, at:-1]
    logp_BTV = (logits(model, hidden) / temperature).log_softmax(-1)
    labels_BT = ids_BS[:, shape.prompt_tokens :]
    right_BT = logp_BTV.gather(-1, labels_BT[..., None])[..., 0].exp()
    roles_T = torch.from_numpy(shape.roles).to(ids_BS.device)
    places_E = (roles_T == Role.OPERAND).nonzero()[:, 0]
    operands_BE, entry = labels_BT[:, places_E], 0
    for size in shape.group_sizes:
        for taken in range(size):
            open_BK = operands_BE[:, entry + taken : entry + size]
            place = places_E[entry + taken]
            right_BT[:, place] = logp_BTV[:, place].gather(-1, open_BK).exp().sum(-1)
        entry += size
    remark_T = roles_T == Role.REMARK
    right_BT[:, remark_T] = logp_BTV[:, remark_T, FIRST_NAME:].exp().sum(-1)
    found = {name: (1 - right_BT[:, roles_T == role]).mean().item() for role, name in ROLE_NAMES.items()}
    return found | {"right": right_BT.clamp(1e-30, 1).log().sum(-1).exp().mean().item()}
