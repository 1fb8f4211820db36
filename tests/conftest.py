import gc
import os

# Commands that run inside the tests' process keep no compiled programs for others.
os.environ.setdefault("JAX_ENABLE_COMPILATION_CACHE", "false")
# The tests are of the CPU, and share what accelerator there is with others, unless the caller says otherwise.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import hypothesis  # noqa: E402
import jax  # noqa: E402
import jaxtyping  # noqa: E402

# Before the package is imported: whatever function of it runs, its annotations are checked, shapes included.
jaxtyping.install_import_hook("rlxjax", "_typecheck.typecheck")
jax.config.update("jax_enable_x64", True)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")
# The same few examples in every run; how long one takes says what else the machine does.
hypothesis.settings.register_profile("lawful", deadline=None, derandomize=True, max_examples=30)
hypothesis.settings.load_profile("lawful")
# Tracing makes many objects that live on: looking through them all again and again takes a while.
gc.set_threshold(50_000, 20, 50)
