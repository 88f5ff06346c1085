"""The argument block of `attention`, `step` and `panels`: which int64 is what. Read by the kernels and by who fills it.

Lower-case words in docstrings are shapes; every array is contiguous unless said otherwise.
"""

(
    QKV,  # address of [rows, heads + 2 kv_heads, head_dim]
    COS,  # address of [rows, head_dim / 2]
    SIN,
    BLOCKS,  # address of i64[rows]: the pool block of each row's new token
    SLOTS,  # address of i64[rows]: the place within it
    POOL,  # address of [block, layer, k/v, kv_head, slot, head_dim]
    HEAD_NORMS,  # address of [heads + kv_heads, head_dim], or 0
    CONSTANTS,  # address of [epsilon, scale of scores]
    ROWS,
    HEADS,
    KV_HEADS,
    HEAD_DIM,
    POOL_BLOCKS,
    BLOCK_TOKENS,
    LAYERS,
    LAYER,
    PIECES,  # address of i64[piece, 4]: row, first token, end token, where its table begins
    PIECE_COUNT,
    TABLE,  # address of i64: pool blocks of all sequences
    TABLE_LENGTH,
    ATTENDED,  # address of i64[attended, 3]: row, first piece, end piece
    ATTENDED_COUNT,
    SCORES,  # address of scratch [team, heads / kv_heads, CHUNK_TOKENS]
    MERGED,  # address of scratch [heads, piece, head_dim + 2]
    ATTENTION,  # address of [attended, heads, head_dim]
    TEAM,  # threads
    ITEM,  # bytes of an element
    PIECE_CODE,  # address of that function
    SELF,  # address of this block
    BARRIER,  # address of zeros, team.BARRIER_BYTES
    ATTENTION_LENGTH,
) = range(31)
"""What `attention` takes; the rest is for `step`."""

(
    WEIGHTS,  # address of i64[layer, LAYER_LENGTH]
    X,  # address of [rows, hidden]: embeddings; changed
    HIDDEN,
    INNER,
    NORMED,  # address of scratch [team, max(rows, wanted), hidden]
    DELTA,  # address of scratch [rows, hidden]
    GATE_UP,  # address of scratch [rows, 2 inner]
    LAST_NORM,  # address of [hidden]
    HEAD,  # address of [vocab, hidden], of the weights' kind
    HEAD_SCALES,  # address of [vocab], or 0
    VOCAB,
    WANTED,  # address of i64[wanted]: rows whose logits are wanted
    WANTED_COUNT,
    LOGITS,  # address of [wanted, vocab]
    ATTENTION_CODE,  # addresses of the functions
    PRODUCT_CODE,
    STEP_LENGTH,
) = range(ATTENTION_LENGTH, ATTENTION_LENGTH + 17)

(
    PANELS,  # of all rows; [panel, n, lanes] is n values of each token
    PANEL_X,  # address of [panel, hidden, lanes]: embeddings; changed
    PANEL_NORMED,  # address of scratch [panel, hidden, lanes]
    PANEL_QKV,  # address of scratch [panel, (heads + 2 kv_heads) * head_dim, lanes]
    PANEL_ATTENTION,  # address of scratch [panel, heads * head_dim, lanes]
    PANEL_INNER,  # address of scratch [panel, inner, lanes]
    PANEL_COS,  # address of [panel, head_dim / 2, lanes]
    PANEL_SIN,
    SEQUENCES,  # address of i64[sequence, 4]: first row, end row, what its first row sees, where its table begins
    SEQUENCE_COUNT,
    LONG_TABLE,  # address of i64: pool blocks of those sequences
    SHORT_ROWS,  # address of i64[attended]: their rows
    PRIVATE,  # address of scratch [team, PRIVATE_BYTES]: see `model.many`
    PRIVATE_BYTES,
    FIRST_WANTED,  # the first panel with a row that is wanted after the last layer; PANELS: none
    ATTEND_CODE,  # address of what attends in panels
    PANELS_LENGTH,
) = range(STEP_LENGTH, STEP_LENGTH + 17)

(
    ATTENTION_NORM,
    QKV_WEIGHTS,
    QKV_SCALES,
    QKV_BIASES,
    QK_NORMS,
    OUT_WEIGHTS,
    OUT_SCALES,
    MLP_NORM,
    GATE_UP_WEIGHTS,
    GATE_UP_SCALES,
    DOWN_WEIGHTS,
    DOWN_SCALES,
    LAYER_LENGTH,
) = range(13)
"""Addresses of a layer; scales, biases and head norms may be 0: there are none."""

PANEL_BYTES = 128
"""Of a panel's row: one feature of as many tokens as two of the widest vectors have lanes."""
TILED = 32
"""Sizes of matrices that AMX tiles multiply are multiples of this."""
PARTS_BYTES = 192
"""Of a panel's row as tiles take it: three parts of two bytes a token."""
TILED_PASS_BYTES = 5 << 18
"""Of what tiles multiply all weights with before the next: most of a second cache."""
BLOCK_OUTPUTS = 12
"""Rows of weights that are multiplied with a panel at once: as many as the registers bear."""
TILE_TOKENS = 64
"""Keys and values that panels of queries attend to at once."""
STATE_ROWS = 2
"""Of what is kept of a head between tiles beside the sums: best score and total."""
ADDED, FRESH, GATED = range(3)
"""What a product does: adds to what is there, replaces it, or multiplies a gate with what is gated."""
