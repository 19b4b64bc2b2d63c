"""The model folder that `from_pretrained` reads: architecture, tokenizer, weights packed for small files. No training."""

from __future__ import annotations

import argparse
import json
import sys
import zlib
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "src")]

from table_sums import BOS, EOS, PAD, UNKNOWN, VOCABULARY, WORD_ID  # noqa: E402

MAX_POSITIONS = 8192
SAID = 0.2
"""How loud a new model says what its heads see; of the size of random outputs."""
FILE_BYTES = 14_000_000
"""A packed file is no larger, up to one tensor's rounding."""


def new_config(layers: int = 8, hidden: int = 512, mlp: int = 2048, head_dim: int = 64, heads: int = 8) -> Qwen3Config:
    """The study's model: 30.8M parameters."""
    return Qwen3Config(
        vocab_size=len(VOCABULARY),
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=2,
        head_dim=head_dim,
        tie_word_embeddings=True,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        initializer_range=0.03,
        pad_token_id=WORD_ID[PAD],
        bos_token_id=WORD_ID[BOS],
        eos_token_id=WORD_ID[EOS],
    )


def small_config() -> Qwen3Config:
    """For dry runs on a CPU."""
    return new_config(layers=4, hidden=128, mlp=256, head_dim=32, heads=4)


def new_model(config: Qwen3Config, seed: int) -> Qwen3ForCausalLM:
    """Random weights, but head j of the first layer looks j + 1 tokens back, and those of later layers say what they see.

    To look something up, one layer has to know what stood before a token, another has to match it and a third to say it;
    from plain noise none helps without the others, and learning waits. So two of the three are there from the start. All
    stays trainable.
    """
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(config).float()
    _look_back(model, config)
    _say_what_is_seen(model, config)
    return model


@torch.no_grad()
def _say_what_is_seen(model: Qwen3ForCausalLM, config: Qwen3Config) -> None:
    """Values are a random projection of the embedding, outputs its transpose, so a head that attends to a word raises that
    word's logit. What all words share is left out."""
    common, width = model.model.embed_tokens.weight.mean(0), config.head_dim
    common = common / common.norm()
    heads_a_group = config.num_attention_heads // config.num_key_value_heads
    for layer in model.model.layers[1:]:
        values, outputs = layer.self_attn.v_proj.weight, layer.self_attn.o_proj.weight
        for group in range(config.num_key_value_heads):
            random = torch.randn(config.hidden_size, width)
            basis = torch.linalg.qr(random - common[:, None] * (common @ random)).Q
            values[group * width : (group + 1) * width] = basis.T
            for head in range(group * heads_a_group, (group + 1) * heads_a_group):
                outputs[:, head * width : (head + 1) * width] = SAID * basis


@torch.no_grad()
def _look_back(model: Qwen3ForCausalLM, config: Qwen3Config) -> None:
    """All embeddings get a direction in common. Queries and keys of the first layer are made of it alone, in the pairs of
    dimensions that RoPE turns fast, queries turned back by j + 1 tokens. Logits do not see what all words share."""
    embedding, attention, width = model.model.embed_tokens.weight, model.model.layers[0].self_attn, config.head_dim
    common = torch.randn(config.hidden_size).sign()
    embedding += config.initializer_range * common
    turn = config.rope_parameters["rope_theta"] ** -(torch.arange(0, width, 2) / width)
    fast = turn > 0.05
    pairs = fast.float() / fast.sum().sqrt()

    def points(tokens_back: int) -> Tensor:
        angle = -turn * tokens_back
        return torch.cat([pairs * angle.cos(), pairs * angle.sin()])

    def only(weight: Tensor, tokens_back: list[int]) -> None:
        rows = torch.cat([points(tokens) for tokens in tokens_back])
        weight.mul_(0.1).add_(4 * rows[:, None] * common / common.norm())

    only(attention.q_proj.weight, [head + 1 for head in range(config.num_attention_heads)])
    only(attention.k_proj.weight, [0] * config.num_key_value_heads)
    for gain in (attention.q_norm.weight, attention.k_norm.weight):
        gain[fast.repeat(2)] = 2.0


def new_tokenizer() -> PreTrainedTokenizerFast:
    """One token a word, words separated by one space. It adds nothing of its own, so encode and decode are inverses."""
    one_a_word = Tokenizer(WordLevel(WORD_ID, unk_token=UNKNOWN))
    one_a_word.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=one_a_word,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNKNOWN,
        padding_side="left",
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )


def stored_weights(model: Qwen3ForCausalLM) -> dict[str, Tensor]:
    """bf16 copies of the weights, the tied output matrix left out."""
    named = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    return {name: tensor.detach().to("cpu", torch.bfloat16).contiguous() for name, tensor in named.items()}


def pack(weights: dict[str, Tensor], folder: Path) -> list[Path]:
    """weights-N.safetensors of at most FILE_BYTES each, bit for bit the same weights in two thirds of the bytes: the
    high bytes (sign and exponent) hold little information and are deflated, the low bytes are stored as they are. Packed
    files that were in the folder before are replaced."""
    files: list[dict[str, Tensor]] = [{}]
    filled = 0
    for name, tensor in weights.items():
        bytes_N2 = tensor.flatten().view(torch.uint8).view(-1, 2)
        high = torch.frombuffer(bytearray(zlib.compress(bytes_N2[:, 1].numpy().tobytes(), 6)), dtype=torch.uint8)
        if filled and filled + len(bytes_N2) + len(high) > FILE_BYTES:
            files.append({})
            filled = 0
        files[-1] |= {f"{name}.low": bytes_N2[:, 0].contiguous(), f"{name}.high": high}
        filled += len(bytes_N2) + len(high)
    paths = [folder / f"weights-{number}.safetensors" for number in range(len(files))]
    for path in folder.glob("weights-*.safetensors"):
        path.unlink()
    for path, tensors in zip(paths, files, strict=True):
        save_file(tensors, path, metadata={"format": "pt"})
    return paths


def unpack(folder: Path, config: Qwen3Config) -> dict[str, Tensor]:
    """The bf16 weights that `pack` wrote into `folder`, checked for completeness against the architecture."""
    packed: dict[str, Tensor] = {}
    for path in sorted(folder.glob("weights-*.safetensors")):
        packed |= load_file(path)
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in Qwen3ForCausalLM(config).named_parameters() if name != "lm_head.weight"}
    missing = [name for name in shapes if f"{name}.low" not in packed]
    if missing:
        raise SystemExit(
            f"{folder} lacks {len(missing)} of {len(shapes)} tensors, e.g. {missing[0]}\nhint: copy all weights-*"
        )
    weights = {}
    for name, shape in shapes.items():
        high = torch.frombuffer(bytearray(zlib.decompress(packed[f"{name}.high"].numpy().tobytes())), dtype=torch.uint8)
        weights[name] = torch.stack([packed[f"{name}.low"], high], 1).flatten().view(torch.bfloat16).view(shape)
    return weights


def load_packed(folder: Path, config: Qwen3Config) -> Qwen3ForCausalLM:
    """The model in fp32 with exactly the values that were packed."""
    model = new_model(config, 0)
    model.load_state_dict({name: tensor.float() for name, tensor in unpack(folder, config).items()}, strict=False)
    return model.eval()


def write_folder(folder: Path, weights: dict[str, Tensor], config: Qwen3Config) -> None:
    """A plain transformers folder. The config says float32: `from_pretrained` computes in fp32 from the bf16 file."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    new_tokenizer().save_pretrained(folder)
    described = config.to_dict() | {"architectures": ["Qwen3ForCausalLM"], "dtype": "float32"}
    described.pop("_name_or_path", None)
    (folder / "config.json").write_text(json.dumps(described, indent=2, sort_keys=True) + "\n")
    GenerationConfig(
        do_sample=True,
        temperature=1.0,
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
        pad_token_id=config.pad_token_id,
    ).save_pretrained(folder)


def main() -> None:
    """python study_folder.py PACKED_FOLDER MODEL_FOLDER"""
    parser = argparse.ArgumentParser(description="Packed weights to a folder that from_pretrained reads.")
    parser.add_argument("packed", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--small", action="store_true", help="weights of a dry run")
    args = parser.parse_args()
    config = small_config() if args.small else new_config()
    write_folder(args.folder, unpack(args.packed, config), config)
    print(f"wrote {args.folder}")


if __name__ == "__main__":
    main()
