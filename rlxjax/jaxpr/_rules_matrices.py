"""Rules of linear algebra.

FLOP are the leading orders of the textbooks, rounded down: LAPACK Working Note 41 for what one factorisation takes,
Golub and Van Loan, Matrix Computations (4th edition), for what iterates. A complex multiply-add is four real ones.
"""

import math
from collections.abc import Callable, Mapping

from ._rules import Operation, OperationCounts, Rule, elements, nbytes, number_kind

LINEAR_ALGEBRA = "linear algebra"


def _matrix(
    flops: Callable[[Operation], int], workspace: Callable[[Operation], int] | None = None, operand: int = 0
) -> Rule:
    """Return the rule of a factorisation: FLOP of one matrix, times the batch before the two axes of an operand."""

    def count(op: Operation) -> OperationCounts:
        shape, is_complex = op.inputs[operand].shape, number_kind(op.inputs[operand].dtype) == "complex"
        return OperationCounts(math.prod(shape[:-2]) * flops(op) * (4 if is_complex else 1))

    return Rule(LINEAR_ALGEBRA, count, workspace=workspace, slices=lambda op: math.prod(op.operand.shape[:-2]))


def _of_order(numerator: int, denominator: int = 1) -> Rule:
    """Return the rule of a square matrix that takes a fraction of n**3 FLOP."""
    return _matrix(lambda op: numerator * op.operand.shape[-1] ** 3 // denominator)


def _lu_flops(op: Operation) -> int:
    m, n = op.operand.shape[-2:]
    k = min(m, n)
    return (6 * m * n * k - 3 * (m + n) * k**2 + 2 * k**3) // 3


def _householder_flops(m: int, n: int, k: int | None = None) -> int:
    """K reflectors of an m by n matrix, made into R or multiplied out into Q; as many as fit unless told."""
    k = min(m, n) if k is None else k
    return (12 * m * n * k - 6 * (m + n) * k**2 + 4 * k**3) // 3


def _qr_flops(op: Operation) -> int:
    m, n = op.operand.shape[-2:]
    return _householder_flops(m, n) + _householder_flops(m, op.result.shape[-1], min(m, n))


def _svd_flops(op: Operation) -> int:
    """Golub and Reinsch (Golub and Van Loan, figure 8.6.1)."""
    n, m = sorted(op.operand.shape[-2:])
    if not op.params.get("compute_uv", True):
        return (12 * m * n**2 - 4 * n**3) // 3
    if op.params.get("full_matrices"):
        return 4 * m**2 * n + 8 * m * n**2 + 9 * n**3
    return 14 * m * n**2 + 8 * n**3


def _eig_flops(op: Operation) -> int:
    """25 n**3 with eigenvectors, 10 n**3 without (Golub and Van Loan, 7.5.6)."""
    vectors = op.params.get("compute_left_eigenvectors") or op.params.get("compute_right_eigenvectors")
    return (25 if vectors else 10) * op.operand.shape[-1] ** 3


def _ormqr_flops(op: Operation) -> int:
    m, n = op.result.shape[-2:]
    length, other = (m, n) if op.params.get("left", True) else (n, m)
    k = op.inputs[1].shape[-1]
    return 4 * length * other * k - 2 * other * k**2


# Libraries want a matrix of their own, in their own order, or give their results in that order.


def _copy(op: Operation) -> int:
    return nbytes(op.operand)


def _copy_of_either(op: Operation) -> int:
    """The operand in another order, or, as it is destroyed, its place and more for the results in that order."""
    return max(nbytes(op.operand), sum(map(nbytes, op.outputs)))


#: By the name of the primitive.
RULES: Mapping[str, Rule] = {
    "cholesky": _of_order(1, 3),
    "eigh": _of_order(9),
    "eig": _matrix(_eig_flops),
    "schur": _of_order(25),
    "hessenberg": _of_order(10, 3),
    "tridiagonal": _of_order(4, 3),
    "lu": _matrix(_lu_flops),
    "qr": _matrix(_qr_flops, _copy),
    "geqrf": _matrix(lambda op: _householder_flops(*op.operand.shape[-2:]), _copy),
    "geqp3": _matrix(lambda op: _householder_flops(*op.operand.shape[-2:])),
    "householder_product": _matrix(lambda op: _householder_flops(*op.operand.shape[-2:], k=op.inputs[1].shape[-1])),
    "ormqr": _matrix(_ormqr_flops),
    "svd": _matrix(_svd_flops, _copy_of_either),
    # n**2 for each right side, which lies along either axis of the second operand.
    "triangular_solve": _matrix(lambda op: math.prod(op.inputs[1].shape[-2:]) * op.operand.shape[-1], _copy),
    # The Thomas algorithm takes 8 n for each right side.
    "tridiagonal_solve": _matrix(lambda op: 8 * math.prod(op.inputs[3].shape[-2:]), operand=3),
    # A rotation of two numbers for each element of the triangle.
    "cholesky_update": _matrix(lambda op: 3 * op.operand.shape[-1] ** 2),
    "symmetric_product": _matrix(lambda op: 2 * math.prod(op.operand.shape[-2:]) * op.operand.shape[-2]),
    "lu_pivots_to_permutation": Rule(LINEAR_ALGEBRA, lambda op: OperationCounts(integer_ops=elements(op.operand))),
}
