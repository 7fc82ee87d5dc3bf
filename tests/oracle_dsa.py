"""Sparse and dense MLA in NumPy float64, query by query: what the operations must compute."""

import numpy as np


def visible(q_position: int, num_keys: int, segments: np.ndarray | None = None, own: int = 0) -> np.ndarray:
    """Mask over the keys that one query sees."""
    mask = np.arange(num_keys) <= q_position
    if segments is not None:
        mask &= (segments == own) & (segments >= 0)
    return mask


def scores(q: np.ndarray, k: np.ndarray, w: np.ndarray) -> np.ndarray:
    """[B, T, S]: sum over heads of w * max(q . k, 0)."""
    q, k, w = (np.asarray(x, np.float64) for x in (q, k, w))
    return np.einsum("bth,bths->bts", w, np.maximum(np.einsum("bthk,bsk->bths", q, k), 0))


def select(row: np.ndarray, mask: np.ndarray, top_k: int) -> list[int]:
    """The chosen positions, ascending: largest scores first, ties to the lowest position."""
    candidates = sorted(np.flatnonzero(mask), key=lambda s: (-row[s], s))
    return sorted(int(s) for s in candidates[:top_k])


def selections(
    q: np.ndarray,
    k: np.ndarray,
    w: np.ndarray,
    top_k: int,
    q_positions: np.ndarray,
    segments: np.ndarray | None = None,
) -> list[list[list[int]]]:
    """The chosen positions of every query of every batch row."""
    table = scores(q, k, w)
    return [
        [select(table[b, t], _visible(b, t, k.shape[1], q_positions, segments), top_k) for t in range(q.shape[1])]
        for b in range(q.shape[0])
    ]


def everything(num_keys: int, q_positions: np.ndarray, segments: np.ndarray | None = None) -> list[list[list[int]]]:
    """What dense causal attention attends."""
    batch, queries = q_positions.shape
    return [
        [np.flatnonzero(_visible(b, t, num_keys, q_positions, segments)).tolist() for t in range(queries)]
        for b in range(batch)
    ]


def padded(chosen: list[list[list[int]]], top_k: int) -> np.ndarray:
    """Selections as an array of indices, -1 at the end."""
    return np.array([[row + [-1] * (top_k - len(row)) for row in rows] for rows in chosen])


def attend(q: np.ndarray, keys: np.ndarray, values: np.ndarray, scale: float) -> tuple[np.ndarray, float]:
    """One head of one query over its keys: output and natural log-sum-exp."""
    if len(keys) == 0:
        return np.zeros(values.shape[1]), -np.inf
    logits = scale * (keys @ q)
    top = logits.max()
    p = np.exp(logits - top)
    return (p / p.sum()) @ values, float(top + np.log(p.sum()))


def mla(
    q: np.ndarray,
    latent: np.ndarray,
    w_uk: np.ndarray,
    w_uv: np.ndarray,
    chosen: list[list[list[int]]],
    scale: float,
) -> np.ndarray:
    """[B, T, H, V] from unabsorbed queries: keys and values of each head are expanded from the chosen latents."""
    q, latent, w_uk, w_uv = (np.asarray(x, np.float64) for x in (q, latent, w_uk, w_uv))
    width = w_uk.shape[2]
    out = np.zeros((*q.shape[:3], w_uv.shape[1]))
    for b, t, h in np.ndindex(*q.shape[:3]):
        rows = latent[b, chosen[b][t]]
        keys = np.concatenate([rows[:, :width] @ w_uk[h].T, rows[:, width:]], axis=1)
        out[b, t, h] = attend(q[b, t, h], keys, rows[:, :width] @ w_uv[h].T, scale)[0]
    return out


def sparse(
    q: np.ndarray, latent: np.ndarray, indices: np.ndarray, latent_width: int, scale: float
) -> tuple[np.ndarray, np.ndarray]:
    """[B, T, H, L] and [B, T, H] from absorbed queries and given indices."""
    q, latent = np.asarray(q, np.float64), np.asarray(latent, np.float64)
    out, lse = np.zeros((*q.shape[:3], latent_width)), np.zeros(q.shape[:3])
    for b, t, h in np.ndindex(*q.shape[:3]):
        rows = latent[b, [s for s in indices[b, t] if 0 <= s < latent.shape[1]]]
        out[b, t, h], lse[b, t, h] = attend(q[b, t, h], rows, rows[:, :latent_width], scale)
    return out, lse


def _visible(b: int, t: int, num_keys: int, q_positions: np.ndarray, segments: np.ndarray | None) -> np.ndarray:
    if segments is None:
        return visible(q_positions[b, t], num_keys)
    return visible(q_positions[b, t], num_keys, segments[b], segments[b, t])
