"""What JAX traces, lowers and compiles, counted by its own monitoring."""

import jax

#: What XLA makes of a lowered program; the other events of compiling are tracing and lowering.
COMPILE = "/jax/core/compile/backend_compile_duration"
#: Events of compiling so far.
compilations: list[str] = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, duration, **_: compilations.append(event) if event.startswith("/jax/core/compile/") else None
)
