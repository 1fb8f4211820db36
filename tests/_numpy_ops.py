"""What the ops compute, in NumPy, and how far from that a kernel may be.

Values are long doubles: what one node computes from its operands, not yet rounded to its dtype.
"""

import itertools

import ml_dtypes
import numpy as np

DTYPES = {"f16": np.float16, "bf16": ml_dtypes.bfloat16, "f32": np.float32, "f64": np.float64}
INTEGERS = {"i8": np.int8, "i32": np.int32}

#: Rounding of one op, in ulps. A sum of n terms has n ulps of the sum of magnitudes, if that is more.
ULPS = 4


def _extreme(choose):
    return lambda x: choose.reduce(x.reshape(-1), keepdims=True) if x.size else np.zeros(1, x.dtype)


UNARY = {
    **{name: getattr(np, name) for name in ("tanh", "sqrt", "exp", "log", "abs")},
    "neg": np.negative,
    "relu": lambda x: np.fmax(x, 0),
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "gelu": lambda x: 0.5 * x * (1 + np.tanh(0.7978845608 * (x + 0.044715 * x**3))),
    **dict.fromkeys(("load", "store", "copy"), lambda x: x),
}
BINARY = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "pow": np.power}
BINARY |= {"max": np.fmax, "min": np.fmin}
REDUCE = {
    "reduce_sum": lambda x: x.sum().reshape(1),
    "reduce_mean": lambda x: (x.mean() if x.size else x.sum()).reshape(1),
    "reduce_max": _extreme(np.fmax),
    "reduce_min": _extreme(np.fmin),
}


def value_of(node, *operands):
    """Return what a node computes from its operands."""
    operands = [np.asarray(x, np.longdouble) for x in operands]
    attributes = node.attributes
    with np.errstate(all="ignore"):
        if node.op in UNARY | BINARY | REDUCE:
            return (UNARY | BINARY | REDUCE)[node.op](*operands)
        if node.op == "matmul":
            return np.matmul(*operands)
        (x, *_) = operands
        if node.op == "cast":
            return np.trunc(x) if node.dtype in INTEGERS else x
        if node.op == "concat":
            return np.concatenate(operands, attributes["axis"])
        if node.op == "broadcast":
            return np.broadcast_to(x.reshape(()) if x.size == 1 else x, node.shape)
        if node.op == "reshape":
            return x.reshape(node.shape)
        if node.op == "transpose":
            return np.transpose(x, attributes.get("permutation"))
        assert node.op == "narrow"
        part = [slice(None)] * x.ndim
        part[attributes["axis"]] = slice(attributes["start"], attributes["start"] + attributes["length"])
        return x[tuple(part)]


def limits_of(dtype):
    """Return the ulp of 1, the largest number and the least normal one of a dtype."""
    if dtype in INTEGERS:
        return 0.0, float(np.iinfo(INTEGERS[dtype]).max), 0.0
    info = ml_dtypes.finfo(DTYPES[dtype])
    return float(info.eps), np.longdouble(info.max), float(info.smallest_normal)


def error_of(node, operands, errors, dtype=None):
    """Return how far a kernel's value of a node may be from that of `value_of`; infinite is anywhere.

    What the errors of the operands, of the same shapes, can do to the value, evaluated at both ends of each, and the
    rounding of the op itself, in the node's dtype unless given. Anywhere: where the ends are not of one kind (a
    number, NaN, an infinity), where a number is beyond the dtype (a kernel that fuses need not compute it), and where
    an integer is.
    """
    ulp, largest, least = limits_of(dtype or node.dtype)
    operands = [np.asarray(x, np.longdouble) for x in operands]
    value = value_of(node, *operands)
    with np.errstate(all="ignore"):
        ends = [[x] if not np.any(e) else [x - e, x + e] for x, e in zip(operands, errors, strict=True)]
        corners = [value_of(node, *corner) for corner in itertools.product(*ends)]
        error = np.zeros(value.shape, np.longdouble)
        for corner in corners:
            same = (corner == value) | (np.isnan(corner) & np.isnan(value))
            apart = np.where(np.isfinite(corner) & np.isfinite(value), np.abs(corner - value), np.inf)
            error = np.maximum(error, np.where(same, 0, apart))
        magnitude, rounding = _rounding(node, value, operands, errors)
        error += np.where(np.isfinite(magnitude), rounding * ulp * magnitude, 0)
        below = (value != 0) & (np.abs(value) < 2 * least)
        error += np.where(below, 2 * least, 0)
        beyond = np.isfinite(magnitude) & (magnitude + error > largest * (1 - 2 * ulp))
        return np.where(beyond | _unsure(node, operands, errors, value), np.inf, error)


def _rounding(node, value, operands, errors):
    """Return what the rounding of an op is relative to, and how many ulps of that it is."""
    x = operands[0]
    if node.op in ("reduce_sum", "reduce_mean"):
        total = np.abs(x).sum() if node.op == "reduce_sum" or not x.size else np.abs(x).mean()
        return np.broadcast_to(total, value.shape), max(ULPS, x.size)
    if node.op == "matmul":
        return np.matmul(np.abs(x), np.abs(operands[1])), max(ULPS, x.shape[-1])
    if node.op == "gelu":
        # The sum 1 + tanh cancels where the operand is negative.
        return np.maximum(np.abs(value), np.where(x > -40, np.abs(x), 0)), ULPS
    if node.op in ("exp", "sigmoid"):
        # The exponent's own rounding: the exponential of a sum in place of a product of exponentials.
        return np.abs(value), ULPS + np.where(np.isfinite(x), np.abs(x), 0)
    if node.op == "pow":
        exponent = np.abs(operands[1] * np.log(np.abs(x)))
        return np.abs(value), ULPS + 2 * np.where(np.isfinite(exponent), exponent, 0)
    return np.abs(value), ULPS


def _unsure(node, operands, errors, value):
    """Where the ends of the operands do not bound what lies between them."""
    x, e = operands[0], np.asarray(errors[0])
    anywhere = [np.isinf(np.asarray(error)) for error in errors]
    if node.op in BINARY:
        unsure = anywhere[0] | anywhere[1]
        y, ey = operands[1], np.asarray(errors[1])
        if node.op == "div":
            unsure |= (ey > 0) & (np.abs(y) <= ey)
        if node.op == "pow":
            unsure |= ((e > 0) & (np.abs(x) <= e)) | ((ey > 0) & (x < e))
        return unsure
    if node.op in REDUCE:
        return np.broadcast_to(np.any(anywhere[0]), value.shape)
    if node.op in ("matmul", "concat"):
        return np.broadcast_to(any(np.any(a) for a in anywhere), value.shape)
    if node.op in ("broadcast", "reshape", "transpose", "narrow"):
        return value_of(node, anywhere[0]) > 0
    if node.op == "gelu":
        return anywhere[0] | ((e > 0.1) & np.isfinite(e))
    if node.op == "cast" and node.dtype in INTEGERS:
        limit = float(np.iinfo(INTEGERS[node.dtype]).max)
        return anywhere[0] | ~(np.abs(x) + e < limit)
    return anywhere[0]
