"""Weights of public models (`models.toml`), norms and biases not counted."""

from msgspec import Struct

from pilotfish.config.hardware.tables import Sourced, read_table


class LatentAttention(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """MLA (DeepSeek-V2, arXiv 2405.04434): the cache holds low-rank KV and a key with positions for all heads."""

    query_rank: int
    rank: int  # of keys and values
    head_dim: int  # of a head's query and key, without positions
    rope_dim: int  # with positions
    value_dim: int

    def weights(self, hidden: int, heads: int) -> int:
        queries = hidden * self.query_rank + self.query_rank * heads * (self.head_dim + self.rope_dim)
        keys_and_values = hidden * (self.rank + self.rope_dim) + self.rank * heads * (self.head_dim + self.value_dim)
        return queries + keys_and_values + heads * self.value_dim * hidden


class ExpertLayers(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    count: int  # of experts in a layer, without shared ones
    chosen: int  # of them by each token
    shared: int = 0  # that every token goes through
    ffn: int  # the width of one
    dense_layers: int = 0  # that have a dense MLP instead

    def touched(self, rows: int) -> float:
        """Mean experts of a layer that `rows` tokens touch, each expert being equally likely."""
        return self.count * (1 - (1 - self.chosen / self.count) ** rows)


class ModelShape(Sourced, frozen=True, kw_only=True):
    layers: int
    hidden: int
    vocab: int
    heads: int
    kv_heads: int = 1  # with latent attention one KV is that of all heads
    head_dim: int = 0
    latent: LatentAttention | None = None
    window: int = 0  # tokens that `windowed_layers` of the layers see
    windowed_layers: int = 0
    ffn: int
    experts: ExpertLayers | None = None
    tied: bool = False  # input and output embeddings are one matrix
    published: float  # parameters in billions, as the publisher gives them

    @property
    def head(self) -> int:
        return self.vocab * self.hidden

    @property
    def embeddings(self) -> int:
        return self.head * (1 if self.tied else 2)

    @property
    def parameters(self) -> int:
        routed = self._expert_layers * self.experts.count * self._expert if self.experts else 0
        return self._shared + routed + self.embeddings

    def read(self, rows: int) -> float:
        return self._shared + (self._expert_layers * self.experts.touched(rows) * self._expert if self.experts else 0.0)

    @property
    def multiplied(self) -> int:
        routed = self._expert_layers * self.experts.chosen * self._expert if self.experts else 0
        return self._shared + routed + self.head

    @property
    def attention(self) -> int:
        grouped = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        return self.layers * (self.latent.weights(self.hidden, self.heads) if self.latent else grouped)

    def context_products(self, context: float) -> float:
        """Multiplications of a row with its queries and scores over `context` tokens."""
        width = 2 * self.head_dim
        if self.latent:
            width = self.latent.head_dim + self.latent.rope_dim + self.latent.value_dim
        seen = (self.layers - self.windowed_layers) * context + self.windowed_layers * min(context, self.window)
        return self.heads * width * seen

    @property
    def kv_values(self) -> int:
        return self.layers * self._kv_layer

    def kv_read(self, context: float) -> float:
        """Numbers read from the KV cache by a row with `context` tokens before it."""
        seen = min(context, self.window)
        return self._kv_layer * ((self.layers - self.windowed_layers) * context + self.windowed_layers * seen)

    @property
    def _kv_layer(self) -> int:
        return self.latent.rank + self.latent.rope_dim if self.latent else 2 * self.kv_heads * self.head_dim

    @property
    def _expert(self) -> int:
        return 3 * self.hidden * self.experts.ffn if self.experts else 0

    @property
    def _expert_layers(self) -> int:
        return self.layers - self.experts.dense_layers if self.experts else 0

    @property
    def _shared(self) -> int:
        dense = (self.layers - self._expert_layers) * 3 * self.hidden * self.ffn
        routing = self.hidden * self.experts.count + self.experts.shared * self._expert if self.experts else 0
        return self.attention + dense + self._expert_layers * routing


MODELS = read_table(__file__, "models", dict[str, ModelShape])
