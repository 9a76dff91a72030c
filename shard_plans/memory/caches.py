"""What a layer keeps of the sequences it serves: keys and values, latents, index keys, windows, recurrent states.

The words and sizes of the family table decide. Sources of the formulas: vLLM's kv_cache_interface.py (AttentionSpec,
MLAAttentionSpec, SlidingWindowSpec, ChunkedLocalAttentionSpec, MambaSpec), mamba_utils.py (gdn and kda state shapes),
SGLang's pool_configurator.py, DeepSeek's flashmla_sparse.py and sparse_swa.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shard_plans.errors import ConfigError, FamilyError
from shard_plans.families.model import Layer, Model
from shard_plans.memory.amount import Amount, exactly
from shard_plans.memory.engine import Engine, load_engine
from shard_plans.memory.kv_format import KvFormat, kv_format
from shard_plans.memory.workload import LARGEST_COUNT, Workload
from shard_plans.placement.grid import Grid

STATE = 4
"""Bytes of a number of a recurrent state: fp32."""
CONVOLUTION = 2
"""Bytes of a remembered input of a convolution: bf16."""
INDEX_BLOCK = 128
"""Numbers of an index key, in fp8, that share an fp32 scale."""
UNSURE = (1.0, 7230 / 3850, 9375 / 3850)
"""Compressed attention: two public logs of DeepSeek-V4-Flash show 7,230 and 9,375 bytes a token where the formulas make
3,850; pages shared by layers of several kinds explain a part. The low, typical and high factor."""
UNSURE_SOURCE = (
    "low is the formula, typical and high are what two public logs of DeepSeek-V4-Flash show for it: 7,230 and 9,375 "
    "bytes a token where the formulas make 3,850"
)


@dataclass(frozen=True, slots=True)
class Kept:
    """One thing that a rank keeps for one layer."""

    operator: str
    record: int = 0
    """Bytes of one record."""
    every: int = 1
    """Tokens that a record stands for."""
    window: int | None = None
    """Tokens of a sequence that are kept at most, those in flight not counted; None: all."""
    state: int = 0
    """Bytes a sequence, however long it is."""
    certain: bool = True
    """Whether engines' logs agree with the formula."""


def kept(layer: Layer, model: Model, grid: Grid, workload: Workload) -> tuple[Kept, ...]:
    """What one rank keeps for a layer. Raises FamilyError for an attention whose memory isn't known."""
    words = layer.words
    kinds = KINDS.get(str(words.get("attn")))
    if kinds is None:
        raise FamilyError(f"family {model.family}: the memory of attention {words.get('attn')!r} isn't known")
    engine = load_engine(workload.engine)
    return (*kinds(layer, model, grid, _format(layer, workload, engine)), *_index(layer, model, workload, engine))


def _format(layer: Layer, workload: Workload, engine: Engine) -> KvFormat:
    """The cache type of a layer: engines store fp8, and fp8 latents of sparse attention, as records of their own."""
    own = engine.value("ds_mla")
    if own and workload.kv_dtype == "fp8" and layer.words.get("index") in ("dsa", "previous"):
        return kv_format(own)
    return kv_format(engine.value("kv_own", {}).get(workload.kv_dtype, workload.kv_dtype))


def _gqa(layer: Layer, model: Model, grid: Grid, kv: KvFormat) -> tuple[Kept, ...]:
    """max(1, kv_heads / tp) heads of keys and values: heads fewer than tp are repeated."""
    heads, width = -(-size(model, "kv_heads", layer) // grid.tp), size(model, "head_dim", layer)
    record = heads * (kv.vector(width) + kv.vector(model.sizes.get("value_dim", width)))
    return (Kept("keys and values", record, window=_tokens(layer, "window") or _tokens(layer, "chunk")),)


def _mla(layer: Layer, model: Model, grid: Grid, kv: KvFormat) -> tuple[Kept, ...]:
    """kv_lora + rope numbers a token, whole on every tp rank."""
    return (Kept("latent", kv.latent(size(model, "kv_lora"), size(model, "rope"))),)


def _kda(layer: Layer, model: Model, grid: Grid, kv: KvFormat) -> tuple[Kept, ...]:
    """A matrix of dim x dim in fp32 for each of heads / tp; the last taps - 1 inputs of q, k and v in bf16."""
    heads, dim = -(-size(model, "kda_heads") // grid.tp), size(model, "kda_dim")
    taps = size(model, "taps") - 1
    return (
        Kept("recurrent state", state=STATE * heads * dim * dim),
        Kept("convolution state", state=CONVOLUTION * 3 * heads * dim * taps),
    )


def _gdn(layer: Layer, model: Model, grid: Grid, kv: KvFormat) -> tuple[Kept, ...]:
    """A matrix of dv x dk in fp32 for each value head of the rank; the last taps - 1 inputs of q, k and v in bf16."""
    keys, dk, dv = size(model, "key_heads"), size(model, "dk"), size(model, "dv")
    keys = keys // grid.tp if keys % grid.tp == 0 else keys  # key heads that don't divide stay whole
    values = keys * size(model, "per_key")
    inputs = 2 * keys * dk + values * dv
    return (
        Kept("recurrent state", state=STATE * values * dv * dk),
        Kept("convolution state", state=CONVOLUTION * inputs * (size(model, "taps") - 1)),
    )


def _compressed(layer: Layer, model: Model, grid: Grid, kv: KvFormat) -> tuple[Kept, ...]:
    """One KV head: a window of records as they are, and one record for every `compress` tokens before it.

    In 8 bits a record is head_dim - rope numbers with a scale of a byte for each 64, rounded up to 8, and rope numbers
    in bf16: 584 bytes for DeepSeek-V4. The compressor remembers what it hasn't compressed yet, in fp32: two windows of
    8 tokens where it compresses 4 (`overlap: 2`), one of 128 where it compresses 128.
    """
    width, rope, every = size(model, "head_dim"), size(model, "rope"), _tokens(layer, "compress")
    small = width - rope + 2 * rope + -(-((width - rope) // 64) // 8) * 8
    record = small if kv.bits <= 8 else kv.vector(width)
    found = [Kept("window of keys and values", record, window=_tokens(layer, "window") or 1, certain=False)]
    if every:
        overlap = _tokens(layer, "overlap") or 1
        found.append(Kept("compressed keys and values", record, every, certain=False))
        if layer.words.get("index_topk"):
            found.append(Kept("compressed index keys", _index_key(model), every, certain=False))
        found.append(Kept("compressor state", state=STATE * overlap * every * width * 2 * overlap, certain=False))
    return tuple(found)


def _index(layer: Layer, model: Model, workload: Workload, engine: Engine) -> tuple[Kept, ...]:
    """Keys of the indexer, whole on every rank: fp8 with a scale for each 128 (dsa), the cache's type (block)."""
    word = layer.words.get("index")
    if word == "block":
        return (Kept("index keys", kv_format(workload.kv_dtype).vector(size(model, "index_dim"))),)
    if word == "dsa" or (word == "previous" and engine.value("index_cache") == "every_layer"):
        return (Kept("index keys", _index_key(model)),)
    return ()


def _tokens(layer: Layer, word: str) -> int | None:
    """A word that counts tokens; None where the layer has none. ConfigError for what can't count any."""
    value = layer.words.get(word)
    if not value:
        return None
    if not 1 <= value <= LARGEST_COUNT or int(value) != value:
        raise ConfigError(
            f"config.json: layer {layer.index} has the {word} {value}; a whole number up to {LARGEST_COUNT} is wanted"
        )
    return int(value)


def _index_key(model: Model) -> int:
    """Bytes of an index key in fp8 with its scales: 132 for 128 numbers."""
    numbers = size(model, "index_dim")
    return numbers + STATE * -(-numbers // INDEX_BLOCK)


KINDS: dict[str, Callable[[Layer, Model, Grid, KvFormat], tuple[Kept, ...]]] = {
    "gqa": _gqa, "mla": _mla, "kda": _kda, "gdn": _gdn, "compressed": _compressed,
}  # fmt: skip
"""The word `attn` -> what it keeps."""


def cached(item: Kept, grid: Grid, workload: Workload) -> Amount:
    """Bytes of it for all sequences of a replica.

    A replica serves ceil(concurrency / dp) sequences of `context` tokens in whole blocks. A window keeps at most
    window - 1 tokens and those in flight, and one block more where it may begin inside one. Whole blocks of a shared
    prefix are kept once; windows and states belong to one sequence.
    """
    engine, sequences = load_engine(workload.engine), -(-workload.concurrency // grid.dp)
    block = int(engine.value("kv_block", 1))
    if item.state:
        held = sequences * item.state
    elif item.window is not None and "window_ratio" not in engine.rules:
        tokens = min(workload.context, item.window - 1 + workload.prefill_chunk)
        blocks = -(-tokens // block) + (1 if block > 1 and tokens < workload.context else 0)
        held = sequences * blocks * block * item.record
    else:
        shared = workload.prefix // block
        blocks = -(-workload.context // block) - shared
        tokens = (sequences * blocks + shared) * block
        if item.window is not None:
            tokens = round(tokens * float(engine.value("window_ratio")))
        tokens += block * int(engine.value("kv_spare_pages", 0))
        held = -(-tokens // item.every) * item.record
    if item.certain:
        return exactly(held)
    return Amount(*(round(held * factor) for factor in UNSURE))


def size(model: Model, name: str, layer: Layer | None = None) -> int:
    """A size of the model, of this layer where the table gives it by layer; FamilyError where the table has none."""
    if name not in model.sizes:
        raise FamilyError(f"family {model.family}: the size {name} is needed to count memory, and the table has none")
    return model.sizes[name]
