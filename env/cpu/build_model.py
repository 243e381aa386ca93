#!/usr/bin/env python3
"""Builds the tiny random model that the CPU stack serves, the same bytes everywhere.

    build_model.py OUT_DIR --kind dense [--dtype float32|bfloat16]
    build_model.py --verify DIR

The only line on stdout is the model's digest. Exit status: 0 done, 1 the model is not what it should be (the message
says which file, what was expected and what was found), 2 usage.

What belongs here: the shape of a model, its tokenizer, its weights, and the proof that a directory still holds
exactly that. What does not: how an engine is started with it, and the expected texts (those are references, made by
running an engine).

Why the bytes are the same on any machine and any Python. Nothing is trained, and no random number generator's or
maths library's output is used: a tensor is SHAKE-256 of its own name, its bytes are added up four at a time (a sum of
uniform numbers is near enough to a normal one) and scaled by one float32 multiplication, which IEEE 754 fixes to the
bit. JSON is written with sorted keys, and safetensors and the tokenizer are written straight in their file formats,
so that no library's version shows in them. The digests are pinned in model-digests.json; a build that differs fails.

Why the weights are what they are. The text is the oracle of the tests, so it has to depend on every block of the
prompt, must not stop by itself and has to survive being fed back:
- Attention is sharpened by the norm of the queries. Left alone, attention in a random model is near uniform, a block of
  64 among many is averaged away, and a block fetched from the wrong place would go unnoticed.
- Only whole words can be generated: the output row of any other token is zero, so its logit is 0, where the greatest of
  3,637 random ones is some four standard deviations above. So there is no end of text before the requested length, no
  half character, and the generated text tokenizes back to the generated tokens (a follow-up turn shares their blocks).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

MANIFEST = "model.json"
MANIFEST_SCHEMA = 1
PINNED = Path(__file__).resolve().with_name("model-digests.json")
DTYPES = ("float32", "bfloat16")

VOCAB_SIZE = 4096
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
PAD_ID, _, EOS_ID = range(3)

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class ModelError(Exception):
    """The model is not what it should be. The text is for the user: expected, found, what to do."""


# --- Tokenizer -------------------------------------------------------------------------------------------------------


def byte_alphabet() -> list[str]:
    """The printable stand-in of each byte, 0 to 255, as byte-level BPE defines it."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(256, 512))
    return [chr(b) if b in printable else chr(next(others)) for b in range(256)]


def syllables() -> list[str]:
    return [consonant + vowel for consonant in "bcdfghjklmnpqrstvwxz" for vowel in "aeiou"]


def tokenizer() -> tuple[dict[str, Any], range]:
    """tokenizer.json, and the ids of the whole words.

    One token is: a special token, a byte, a syllable (`ba`), a syllable after a space (` ba`), or a word of two
    syllables after a space (` bato`). Consonant and vowel alternate, so a text of words has one possible reading:
    ` bato zeki` is two tokens, and any other text still encodes, byte by byte where nothing fits.
    """
    space = byte_alphabet()[0x20]
    parts = syllables()
    merges = [(s[0], s[1]) for s in parts] + [(space, s) for s in parts]
    room = VOCAB_SIZE - len(SPECIAL_TOKENS) - 256 - len(merges)
    # Spread over all pairs of syllables instead of taking the first ones, which would all begin with b.
    for n in range(room):
        first, second = divmod(n * 7919 % len(parts) ** 2, len(parts))
        merges.append((space + parts[first], parts[second]))
    tokens = [*SPECIAL_TOKENS, *byte_alphabet(), *(left + right for left, right in merges)]
    if not len(tokens) == len(set(tokens)) == VOCAB_SIZE:
        raise AssertionError(f"expected {VOCAB_SIZE} different tokens, found {len(set(tokens))} of {len(tokens)}")

    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    document = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, "content": text, **flags} for i, text in enumerate(SPECIAL_TOKENS)],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {text: i for i, text in enumerate(tokens)},
            "merges": [list(pair) for pair in merges],
        },
    }
    return document, range(VOCAB_SIZE - room, VOCAB_SIZE)


# --- Weights ---------------------------------------------------------------------------------------------------------


def random_tensor(name: str, shape: tuple[int, ...], std: float) -> Any:
    """A float32 array of near-normal numbers that depends on nothing but its arguments."""
    import numpy as np

    count = int(np.prod(shape))
    noise = hashlib.shake_256(f"kvcr-phase1 tiny model: {name}".encode()).digest(4 * count)
    # Four uniform bytes have mean 510 and variance 4 * (256**2 - 1) / 12. The sum is exact, so only the last
    # multiplication rounds, once.
    total = np.frombuffer(noise, dtype=np.uint8).reshape(count, 4).sum(axis=1, dtype=np.int32) - 510
    return (total.astype(np.float32) * np.float32(std / 21845**0.5)).reshape(shape)


def constant_tensor(shape: tuple[int, ...], value: float) -> Any:
    import numpy as np

    return np.full(shape, value, dtype=np.float32)


def encode_tensor(array: Any, dtype: str) -> bytes:
    import numpy as np

    if dtype == "float32":
        return array.astype("<f4").tobytes()
    # bfloat16 is the upper half of float32; round to nearest, ties to even, as every framework does.
    bits = np.ascontiguousarray(array, dtype="<f4").view("<u4")
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2").tobytes()


def safetensors_file(tensors: dict[str, Any], dtype: str) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    body = bytearray()
    for name in sorted(tensors):
        data = encode_tensor(tensors[name], dtype)
        header[name] = {
            "dtype": {"float32": "F32", "bfloat16": "BF16"}[dtype],
            "shape": list(tensors[name].shape),
            "data_offsets": [len(body), len(body) + len(data)],
        }
        body += data
    text = json.dumps(header, sort_keys=True, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the format wants the data aligned to 8 bytes
    return len(text).to_bytes(8, "little") + text + bytes(body)


# --- Kinds of model --------------------------------------------------------------------------------------------------


def json_file(document: Any) -> bytes:
    return (json.dumps(document, indent=1, sort_keys=True, ensure_ascii=True) + "\n").encode()


def text_files() -> tuple[dict[str, bytes], range]:
    """What every kind shares: tokenizer, chat template, generation defaults; and the ids of the whole words."""
    document, words = tokenizer()
    files = {
        "tokenizer.json": json_file(document),
        "tokenizer_config.json": json_file(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "model_max_length": 32768,
                "eos_token": SPECIAL_TOKENS[EOS_ID],
                "pad_token": SPECIAL_TOKENS[PAD_ID],
                "clean_up_tokenization_spaces": False,
            }
        ),
        "chat_template.jinja": CHAT_TEMPLATE.encode(),
        "generation_config.json": json_file(
            {"bos_token_id": PAD_ID, "eos_token_id": EOS_ID, "pad_token_id": PAD_ID, "do_sample": False}
        ),
    }
    return files, words


# What both kinds have.
LAYERS, HIDDEN, MIDDLE, HEADS, KV_HEADS, HEAD_DIM = 4, 256, 512, 4, 2, 64
STD = 0.08
QUERY_NORM = 3.0


class Weights:
    """The tensors of one kind of model, by name; `one` is the weight by which a norm multiplies by 1."""

    def __init__(self, kind: str, one: float, words: range) -> None:
        self.kind, self.one = kind, one
        self.tensors: dict[str, Any] = {}
        self.matrix("model.embed_tokens.weight", VOCAB_SIZE, HIDDEN)
        self.norm("model.norm.weight", HIDDEN)
        self.matrix("lm_head.weight", VOCAB_SIZE, HIDDEN)
        self.tensors["lm_head.weight"][: words.start] = 0.0

    def matrix(self, name: str, *shape: int, std: float = STD) -> None:
        self.tensors[name] = random_tensor(f"{self.kind}/{name}", shape, std)

    def norm(self, name: str, size: int, scale: float = 1.0) -> None:
        self.tensors[name] = constant_tensor((size,), self.one + scale - 1.0)

    def layer(self, at: str) -> None:
        """What surrounds the attention, or what stands in its place."""
        self.norm(f"{at}.input_layernorm.weight", HIDDEN)
        self.norm(f"{at}.post_attention_layernorm.weight", HIDDEN)
        self.matrix(f"{at}.mlp.gate_proj.weight", MIDDLE, HIDDEN)
        self.matrix(f"{at}.mlp.up_proj.weight", MIDDLE, HIDDEN)
        self.matrix(f"{at}.mlp.down_proj.weight", HIDDEN, MIDDLE)

    def attention(self, at: str, query_rows: int) -> None:
        self.norm(f"{at}.self_attn.q_norm.weight", HEAD_DIM, QUERY_NORM)
        self.norm(f"{at}.self_attn.k_norm.weight", HEAD_DIM)
        self.matrix(f"{at}.self_attn.q_proj.weight", query_rows, HIDDEN)
        self.matrix(f"{at}.self_attn.k_proj.weight", KV_HEADS * HEAD_DIM, HIDDEN)
        self.matrix(f"{at}.self_attn.v_proj.weight", KV_HEADS * HEAD_DIM, HIDDEN)
        self.matrix(f"{at}.self_attn.o_proj.weight", HIDDEN, HEADS * HEAD_DIM)


def config_file(dtype: str, rope: dict[str, Any], own: dict[str, Any]) -> bytes:
    """config.json: what both kinds say, and what is the kind's `own`."""
    return json_file(
        {
            "dtype": dtype,
            "vocab_size": VOCAB_SIZE,
            "hidden_size": HIDDEN,
            "intermediate_size": MIDDLE,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "head_dim": HEAD_DIM,
            "max_position_embeddings": 32768,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-06,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, **rope},
            "tie_word_embeddings": False,
            "initializer_range": STD,
            "bos_token_id": PAD_ID,
            "eos_token_id": EOS_ID,
            "pad_token_id": PAD_ID,
            "use_cache": True,
            **own,
        }
    )


def dense(dtype: str) -> dict[str, bytes]:
    """Qwen3, 4.5 million parameters, full attention in each of four layers.

    A block of 64 tokens is 4 layers x (key, value) x 2 heads x 64 x 64 numbers: 256 KiB in float32, 128 KiB in
    bfloat16.
    """
    files, words = text_files()
    weights = Weights("dense", 1.0, words)
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        weights.layer(at)
        weights.attention(at, HEADS * HEAD_DIM)
    files["config.json"] = config_file(
        dtype,
        rope={},
        own={
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "layer_types": ["full_attention"] * LAYERS,
            "max_window_layers": LAYERS,
            "use_sliding_window": False,
            "sliding_window": None,
        },
    )
    files["model.safetensors"] = safetensors_file(weights.tensors, dtype)
    return files


def hybrid(dtype: str) -> dict[str, bytes]:
    """Qwen3.5, 4.7 million parameters: three gated-delta-net layers and one of full attention.

    An engine keeps its cache in four groups then, one of attention and three of states, as for Qwen3.5-4B. The states
    forget at four speeds, half of a thing within 33 to 3,000 tokens, so that the text depends on the state at the end
    of a reused prefix, and on every block of it, as well as on its keys and values.
    """
    import numpy as np

    key_heads, value_heads, state_dim, kernel = 2, 4, 64, 4
    forgetting = (-8.0, -6.5, -5.0, -3.5)  # logarithms; all exact in either dtype
    kinds = ["linear_attention"] * (LAYERS - 1) + ["full_attention"]
    mixed = (2 * key_heads + value_heads) * state_dim

    files, words = text_files()
    # Its norms multiply by one more than their weight, all but that of the states.
    weights = Weights("hybrid", 0.0, words)
    for layer, kind in enumerate(kinds):
        at = f"model.layers.{layer}"
        weights.layer(at)
        if kind == "full_attention":
            # A gate beside each query.
            weights.attention(at, 2 * HEADS * HEAD_DIM)
            continue
        weights.matrix(f"{at}.linear_attn.in_proj_qkv.weight", mixed, HIDDEN)
        weights.matrix(f"{at}.linear_attn.in_proj_z.weight", value_heads * state_dim, HIDDEN)
        weights.matrix(f"{at}.linear_attn.in_proj_a.weight", value_heads, HIDDEN)
        weights.matrix(f"{at}.linear_attn.in_proj_b.weight", value_heads, HIDDEN)
        weights.matrix(f"{at}.linear_attn.conv1d.weight", mixed, 1, kernel, std=0.5)
        weights.matrix(f"{at}.linear_attn.out_proj.weight", HIDDEN, value_heads * state_dim)
        weights.tensors[f"{at}.linear_attn.A_log"] = np.array(forgetting, dtype=np.float32)
        weights.tensors[f"{at}.linear_attn.dt_bias"] = constant_tensor((value_heads,), 0.0)
        weights.tensors[f"{at}.linear_attn.norm.weight"] = constant_tensor((state_dim,), 1.0)
    files["config.json"] = config_file(
        dtype,
        rope={"partial_rotary_factor": 0.25},
        own={
            "architectures": ["Qwen3_5ForCausalLM"],
            "model_type": "qwen3_5_text",
            "layer_types": kinds,
            "full_attention_interval": LAYERS,
            "linear_conv_kernel_dim": kernel,
            "linear_key_head_dim": state_dim,
            "linear_num_key_heads": key_heads,
            "linear_num_value_heads": value_heads,
            "linear_value_head_dim": state_dim,
            "partial_rotary_factor": 0.25,
        },
    )
    files["model.safetensors"] = safetensors_file(weights.tensors, dtype)
    return files


KINDS: dict[str, Callable[[str], dict[str, bytes]]] = {"dense": dense, "hybrid": hybrid}


# --- Directories -----------------------------------------------------------------------------------------------------


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def combined_digest(hashes: dict[str, str]) -> str:
    """One digest for the whole model: that of `sha256sum`'s listing of its files, by name."""
    return sha256("".join(f"{hashes[name]}  {name}\n" for name in sorted(hashes)).encode())


def pinned_digests() -> dict[str, str]:
    try:
        return json.loads(PINNED.read_text())
    except FileNotFoundError:
        return {}


def check_pinned(key: str, digest: str) -> None:
    expected = pinned_digests().get(key)
    if expected is None:
        raise ModelError(
            f"{key}: expected a pinned digest in {PINNED.name}, found none (this build is {digest}). "
            "Add it with --pin once the model is known to be right."
        )
    if expected != digest:
        raise ModelError(
            f"{key}: expected digest {expected}, found {digest}. Either this machine builds other bytes than all "
            "others did, or build_model.py was changed: then run it with --pin, and renew the references made with "
            "the old model."
        )


def verify(directory: Path, pinned: bool = True) -> dict[str, Any]:
    """The manifest of a model directory, once every file of it is proven to be what the manifest says."""
    again = "Remove the directory and build it again."
    path = directory / MANIFEST
    try:
        manifest = json.loads(path.read_bytes())
        key, files = f"{manifest['kind']}/{manifest['dtype']}", dict(manifest["files"])
        schema, digest = manifest["schema"], manifest["digest"]
    except FileNotFoundError:
        raise ModelError(f"{path}: expected the manifest of a built model, found no such file. {again}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{path}: expected the manifest of a built model, found {error!r}. {again}") from None
    if schema != MANIFEST_SCHEMA:
        raise ModelError(f"{path}: expected schema {MANIFEST_SCHEMA}, found {schema!r}. {again}")
    for name, expected in sorted(files.items()):
        try:
            found = sha256((directory / name).read_bytes())
        except FileNotFoundError:
            raise ModelError(f"{directory / name}: expected sha256 {expected}, found no such file. {again}") from None
        if found != expected:
            raise ModelError(f"{directory / name}: expected sha256 {expected}, found {found}. {again}")
    extra = sorted(p.name for p in directory.iterdir() if p.name != MANIFEST and p.name not in files)
    if extra:
        raise ModelError(
            f"{directory / extra[0]}: expected only files that the manifest lists, found this one too. "
            f"An engine may read it. {again}"
        )
    if combined_digest(files) != digest:
        raise ModelError(f"{path}: expected digest {combined_digest(files)} for these files, found {digest}. {again}")
    if pinned:
        check_pinned(key, digest)
    return manifest


def holds(directory: Path, digest: str) -> bool:
    try:
        return verify(directory)["digest"] == digest
    except ModelError:
        return False


def build(out: Path, kind: str, dtype: str, pin: bool = False) -> str:
    """Builds into a temporary directory beside `out` and renames it there; nobody sees half a model."""
    key = f"{kind}/{dtype}"
    if out.exists():
        if not (out / MANIFEST).is_file() and (not out.is_dir() or any(out.iterdir())):
            raise ModelError(
                f"{out}: expected a model built here, an empty directory or nothing, found something else. "
                "Not touched; name another directory."
            )
        try:
            manifest = verify(out, pinned=not pin)
            if f"{manifest['kind']}/{manifest['dtype']}" == key and not pin:
                return manifest["digest"]
        except ModelError as error:
            print(f"build_model: rebuilding: {error}", file=sys.stderr)

    files = KINDS[kind](dtype)
    hashes = {name: sha256(data) for name, data in files.items()}
    digest = combined_digest(hashes)
    if pin:
        PINNED.write_text(json.dumps({**pinned_digests(), key: digest}, indent=2, sort_keys=True) + "\n")
    check_pinned(key, digest)

    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        made = temporary / "new"
        made.mkdir()
        files[MANIFEST] = json_file(
            {"schema": MANIFEST_SCHEMA, "kind": kind, "dtype": dtype, "files": hashes, "digest": digest}
        )
        for name, data in files.items():
            (made / name).write_bytes(data)
        try:
            # Somebody else may have built the same model in the meantime, and an engine may be reading it by now:
            # theirs stays, if it is whole.
            if out.exists() and not holds(out, digest):
                out.rename(temporary / "old")
            if not out.exists():
                made.rename(out)
        except OSError:
            if not holds(out, digest):
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return digest


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Build or verify the tiny random model of the CPU stack.")
    parser.add_argument("out", nargs="?", type=Path, help="directory to build")
    parser.add_argument("--kind", choices=sorted(KINDS), default="dense")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="float32: no near ties in greedy text")
    parser.add_argument("--verify", metavar="DIR", type=Path, help="prove that DIR is whole, and build nothing")
    parser.add_argument("--pin", action="store_true", help=f"accept this build's digest into {PINNED.name}")
    options = parser.parse_args(argv)
    if (options.out is None) == (options.verify is None):
        parser.error("expected either a directory to build or --verify DIR")
    try:
        if options.verify is not None:
            digest = verify(options.verify)["digest"]
        else:
            # abspath, not resolve: a link at OUT_DIR is the caller's, and is replaced rather than followed.
            digest = build(Path(os.path.abspath(options.out)), options.kind, options.dtype, options.pin)
    except ModelError as error:
        print(f"build_model: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"build_model: expected a readable and writable place, found: {error}", file=sys.stderr)
        return 1
    print(digest)
    return 0


if __name__ == "__main__":
    sys.exit(main())
