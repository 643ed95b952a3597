"""Numbers as NCCL stores, rounds and reduces them, written with numpy: what its answers are compared with."""

from __future__ import annotations

import numpy as np

INT8, UINT8, INT32, UINT32, INT64, UINT64, F16, F32, F64, BF16, E4M3, E5M2 = range(12)
SUM, PROD, MAX, MIN, AVG = range(5)
STORED = ["i1", "u1", "i4", "u4", "i8", "u8", "f2", "f4", "f8", "u2", "u1", "u1"]


def small_table(exponent_bits: int, mantissa_bits: int, *, has_infinity: bool) -> np.ndarray:
    """The value of every code of an 8-bit float."""
    bias = 2 ** (exponent_bits - 1) - 1
    values = np.zeros(256)
    for code in range(256):
        exponent, mantissa = code >> mantissa_bits & (2**exponent_bits - 1), code & (2**mantissa_bits - 1)
        if has_infinity and exponent == 2**exponent_bits - 1:
            value = float("inf") if mantissa == 0 else float("nan")
        elif not has_infinity and code & 0x7F == 0x7F:
            value = float("nan")
        elif exponent == 0:
            value = mantissa * 2.0 ** (1 - bias - mantissa_bits)
        else:
            value = (1 + mantissa / 2**mantissa_bits) * 2.0 ** (exponent - bias)
        values[code] = -value if code & 0x80 else value
    return values


TABLES = {E4M3: small_table(4, 3, has_infinity=False), E5M2: small_table(5, 2, has_infinity=True)}


def decode(stored: np.ndarray, dtype: int) -> np.ndarray:
    """Stored elements as numbers that numpy computes with."""
    if dtype == BF16:
        return (stored.astype(np.uint32) << 16).view(np.float32)
    if dtype in TABLES:
        return TABLES[dtype][stored]
    return stored


def encode(values: np.ndarray, dtype: int) -> np.ndarray:
    """Numbers rounded to nearest, ties to even, as NCCL's conversions do (8-bit floats through float16, saturating)."""
    if dtype == BF16:
        bits = np.ascontiguousarray(values, np.float32).view(np.uint32).astype(np.uint64)
        return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    if dtype in TABLES:
        half = values.astype(np.float16).astype(np.float64)
        table = TABLES[dtype]
        codes = np.array([code for code in range(128) if np.isfinite(table[code])])
        distance = np.abs(np.minimum(np.abs(half), table[codes].max())[:, None] - table[codes][None, :])
        # Of two equally near codes the even one.
        nearest = codes[np.argmin(distance + (codes & 1)[None, :] * 1e-12, axis=1)]
        return (nearest | np.where(np.signbit(half), 0x80, 0)).astype(np.uint8)
    return values.astype(STORED[dtype])


def step(left: np.ndarray, right: np.ndarray, dtype: int, op: int) -> np.ndarray:
    a, b = decode(left, dtype), decode(right, dtype)
    with np.errstate(over="ignore"):
        results = {
            SUM: lambda: a + b,
            PROD: lambda: a * b,
            MAX: lambda: np.maximum(a, b),
            MIN: lambda: np.minimum(a, b),
        }
        return encode(results[op](), dtype)


def reduced(parts: list[np.ndarray], dtype: int, op: int) -> np.ndarray:
    """What NCCL makes of the members' contributions, in group-rank order."""
    n, is_integer = len(parts), dtype <= UINT64
    if op == AVG and not is_integer:
        factor = np.array([1.0 / n])
        factor = encode(factor.astype(np.float64 if dtype == F64 else np.float32), dtype)
        parts = [step(part, np.repeat(factor, len(part)), dtype, PROD) for part in parts]
    total = parts[0]
    for part in parts[1:]:
        total = step(total, part, dtype, SUM if op == AVG else op)
    if op == AVG and is_integer:
        return np.trunc(total / n).astype(STORED[dtype]) if dtype < INT64 else total // n
    return total


def contribution(dtype: int, rank: int, count: int, seed: int = 0) -> np.ndarray:
    random = np.random.default_rng((dtype, rank, seed))
    if dtype <= UINT64:
        # Up to overflow for the small types; never negative where the average is checked with //.
        low = 0 if dtype in (INT64, UINT8, UINT32, UINT64) else -100
        return random.integers(low, 100, count).astype(STORED[dtype])
    values = random.normal(0, 3, count)
    return encode(values if dtype == F64 else values.astype(np.float32), dtype)
