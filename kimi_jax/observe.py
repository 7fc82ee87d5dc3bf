"""Reading inner values of layers while they run, without the layers knowing what for."""

from typing import Literal

from jaxtyping import Array, Float, Int

from kimi_jax.modules.attn_res import AttentionResidual
from kimi_jax.modules.kda import KimiDeltaAttention
from kimi_jax.modules.mla import MlaKeys, MlaQueries, MultiHeadLatentAttention
from kimi_jax.modules.moe import MixtureOfExperts, Routing
from kimi_jax.rows import Rows
from pallas_kernels.lightning_indexer import index_scores

Observed = dict[str, Array]


class Observer:
    """What to compute from inner values beside the output; every method returns named arrays of one layer.

    A name belongs to one kind of layer. Floating-point values are differentiable where the decoder is.
    """

    wants_selection = False
    """Whether `mla` is given the positions that the indexer selected; listing them takes time."""

    def layer(self, partial: Float[Array, "B T D"]) -> Observed:
        """Of any layer, given its output."""
        return {}

    def residual(
        self,
        place: Literal["attention", "ffn"],
        residual: AttentionResidual,
        partial: Float[Array, "B T D"],
        bank: Float[Array, "N B T D"],
        num_rows: Int[Array, ""] | int,
    ) -> Observed:
        """Of any layer of a model with Attention Residuals, twice: given what its two sublayers mix their input from."""
        return {}

    def kda(self, mixer: KimiDeltaAttention, x: Float[Array, "B T D"]) -> Observed:
        """Of a KDA layer, given its normalised input."""
        return {}

    def mla(
        self,
        mixer: MultiHeadLatentAttention,
        queries: MlaQueries,
        keys: MlaKeys,
        rows: Rows,
        selected: Int[Array, "B T k"] | None,
    ) -> Observed:
        """Of a full-attention layer."""
        return {}

    def moe(self, ffn: MixtureOfExperts, routing: Routing, rows: Rows) -> Observed:
        """Of a mixture of experts; rows of `routing` are B·T."""
        return {}


class Trace(Observer):
    """Layer outputs, chosen experts, index scores and selections: what parity checks compare."""

    wants_selection = True

    def layer(self, partial: Float[Array, "B T D"]) -> Observed:
        """The residual stream after the layer."""
        return {"layer_out": partial}

    def mla(
        self,
        mixer: MultiHeadLatentAttention,
        queries: MlaQueries,
        keys: MlaKeys,
        rows: Rows,
        selected: Int[Array, "B T k"] | None,
    ) -> Observed:
        """The indexer's scores and selection, of sparse layers."""
        if selected is None or queries.index_q is None or keys.index_key is None or queries.index_w is None:
            return {}
        scores = index_scores(queries.index_q, keys.index_key, queries.index_w, rows.positions)
        return {"index_scores": scores, "selected": selected}

    def moe(self, ffn: MixtureOfExperts, routing: Routing, rows: Rows) -> Observed:
        """The chosen experts and their weights."""
        shape = (*rows.positions.shape, -1)
        return {"experts": routing.experts.reshape(shape), "expert_weights": routing.weights.reshape(shape)}


class Inside(Trace):
    """What `Trace` sees, and how KDA forgets and Attention Residuals mix: for looking into a model.

    `log_decay` [B, T, H, K] and `beta` [B, T, H] by KDA layer; `attention_residual` and `ffn_residual` [rows + 1, B, T] by
    layer, the weights of the bank's rows and, last, of the partial sum.
    """

    def residual(
        self,
        place: Literal["attention", "ffn"],
        residual: AttentionResidual,
        partial: Float[Array, "B T D"],
        bank: Float[Array, "N B T D"],
        num_rows: Int[Array, ""] | int,
    ) -> Observed:
        """The mixture's weights."""
        return {f"{place}_residual": residual.weights(partial, bank, num_rows)}

    def kda(self, mixer: KimiDeltaAttention, x: Float[Array, "B T D"]) -> Observed:
        """The log decay of every channel and the strength of the writes."""
        log_decay, beta = mixer.gates(x)
        return {"log_decay": log_decay, "beta": beta}
