"""The vocabulary: the operations that are counted in kernels. All operations of the same class cost about the same."""

import functools
import hashlib
from collections.abc import Mapping

from rlxjax._values import FrozenDict

#: The operations of each class. `name` counts the primitive `name`; `name=first,second` counts the listed primitives.
#: A count is a number of real-valued operations, or of elements if nothing is computed, unless a rule says otherwise.
_CLASSES: Mapping[str, str] = {
    "arithmetic": "add=add,sub,add_any neg=neg,abs,sign,conj mul=mul,square,integer_pow,polynomial,one_minus_square "
    "max=max,min,clamp round=floor,ceil,round,reduce_precision,is_finite compare=eq,ne,lt,le,gt,ge,eq_to,lt_to,le_to "
    "logic=and,or,xor,not shift=shift_left,shift_right_arithmetic,shift_right_logical select_n nextafter "
    "bits=population_count,clz,mulhi other",
    "movement": "broadcast_in_dim=broadcast_in_dim,tile convert_element_type=convert_element_type,bitcast_convert_type "
    "iota slice=slice,split,unstack concatenate=concatenate,stack pad rev copy=copy,copy_p,device_put copy_beside "
    "reorder complex=complex,real,imag dynamic_slice=dynamic_slice,get "
    "dynamic_update_slice=dynamic_update_slice,swap,addupdate",
    "transpose": "transpose transpose_inner transpose_inner_untiled",
    "special": "div sqrt rsqrt exp=exp,exp2 expm1 log=log,log2 log1p tanh logistic pow cbrt erf erfc sinh cosh asinh "
    "acosh atanh erf_inv bessel_i0e bessel_i1e",
    "dear": "sin cos tan asin acos atan atan2 rem lgamma digamma div_integer rem_integer div_by_scalar rem_by_scalar",
    "iterated": "igamma=igamma,igammac igamma_grad_a random_gamma_grad regularized_incomplete_beta polygamma zeta "
    "random_gamma",
    "reduction": "reduce_sum_inner reduce_sum reduce_max_inner=reduce_max_inner,reduce_min_inner "
    "reduce_max=reduce_max,reduce_min reduce_prod_inner reduce_prod "
    "reduce_logic_inner=reduce_and_inner,reduce_or_inner,reduce_xor_inner "
    "reduce_logic=reduce_and,reduce_or,reduce_xor argmax=argmax,argmin reduce reduced_rows short_row_elements",
    "cumulative": "cumsum cumprod cummax=cummax,cummin cumlogsumexp",
    "window": "reduce_window=reduce_window,reduce_window_sum reduce_window_max=reduce_window_max,reduce_window_min "
    "select_and_scatter=select_and_scatter,select_and_scatter_add,select_and_gather_add",
    "product": "dot_general=dot_general,scaled_dot,ragged_dot_general products product_loads product_results "
    "product_with_vector",
    "convolution": "conv_general_dilated convolution_runs convolution_loads convolution_edge_loads",
    "transform": "fft_steps fft_long_steps transforms",
    "sort": "sort sort_several top_k=top_k,approx_top_k top_k_by_sort",
    "factorisation": "cholesky triangular_solve lu qr=qr,geqrf,geqp3 householder=householder_product,ormqr eigh svd "
    "eig=eig,schur,hessenberg tridiagonal=tridiagonal,tridiagonal_solve,cholesky_update",
    "random": "threefry=threefry2x32,random_bits,random_split,random_fold_in,random_seed philox=rng_uniform,"
    "rng_bit_generator",
    "indexing": "gather gather_places scatter scatter_places",
}
#: A factorisation has counts of matrix elements, FLOP, columns and matrices: any of these can take most of its time.
_FACTORISATIONS = [entry.partition("=")[0] for entry in _CLASSES["factorisation"].split()]
#: Dict from each operation to its class. Its order is the order of the last axis of `Kernels.counts`.
OPERATIONS: Mapping[str, str] = FrozenDict(
    {entry.partition("=")[0]: name for name, text in _CLASSES.items() for entry in text.split()}
    | {f"{name}_{what}": "factorisation" for name in _FACTORISATIONS for what in ("flop", "columns", "matrices")}
)
CLASSES: tuple[str, ...] = tuple(_CLASSES)
_OF_PRIMITIVE: Mapping[str, str] = {
    primitive: entry.partition("=")[0]
    for text in _CLASSES.values()
    for entry in text.split()
    for primitive in (entry.partition("=")[2] or entry).split(",")
}
#: The families of kernels. A kernel of any other family counts as "custom".
FAMILIES = [
    *("elementwise", "reduction", "movement", "gather", "scatter", "cumulative", "window", "matmul"),
    *("convolution", "fft", "sort", "random", "custom", "linear algebra"),
]
#: Dict from a family to an operation: primitives of the family that the vocabulary lacks count as this operation.
_OF_FAMILY: Mapping[str, str] = {
    **{"reduction": "reduce", "gather": "gather", "scatter": "scatter", "cumulative": "cumsum"},
    **{"window": "reduce_window", "matmul": "dot_general", "convolution": "conv_general_dilated", "fft": "fft_steps"},
    **{"sort": "sort", "linear algebra": "lu", "random": "threefry", "movement": "copy"},
}
PLACE_OF: Mapping[str, int] = FrozenDict({name: place for place, name in enumerate(OPERATIONS)})
FAMILY_CODE: Mapping[str, int] = FrozenDict({name: code for code, name in enumerate(FAMILIES)})


def operation_of(primitive: str, family: str) -> str:
    """Return the operation that a primitive counts as. If the vocabulary lacks the primitive, the family decides.

    Examples:
        >>> operation_of("sub", "elementwise"), operation_of("mine", "reduction"), operation_of("mine", "custom")
        ('add', 'reduce', 'other')
    """
    return _OF_PRIMITIVE.get(primitive) or _OF_FAMILY.get(family, "other")


@functools.cache
def vocabulary_version() -> str:
    """Return a hash of the vocabulary's names, classes and families. The hash changes whenever any of these changes."""
    text = f"{dict(OPERATIONS)} {FAMILIES}"
    return hashlib.sha256(text.encode()).hexdigest()[:12]
