import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec

from unison.lowering import lower_for_cpu
from unison.runtime.devices import prepare_backend

NHWC = ("NHWC", "HWIO", "NHWC")
NCHW = ("NCHW", "OIHW", "NCHW")
NWC = ("NWC", "WIO", "NWC")
NDHWC = ("NDHWC", "DHWIO", "NDHWC")

# image, filter, strides, padding, filter dilation, dimension numbers
CONVOLUTIONS = {
    "first layer": ((4, 28, 28, 1), (3, 3, 1, 8), (1, 1), "VALID", (1, 1), NHWC),
    "unpadded, patches beyond the cache": (
        (64, 13, 13, 32),
        (3, 3, 32, 4),
        (1, 1),
        "VALID",
        (1, 1),
        NHWC,
    ),
    "batch of a prime size": ((67, 13, 13, 32), (3, 3, 32, 4), (1, 1), "VALID", (1, 1), NHWC),
    "cotangents beyond the cache": (
        (128, 13, 13, 4),
        (3, 3, 4, 32),
        (1, 1),
        "SAME",
        (1, 1),
        NHWC,
    ),
    "such ones of a strided convolution": (
        (64, 28, 27, 3),
        (7, 7, 3, 64),
        (2, 2),
        "SAME",
        (1, 1),
        NHWC,
    ),
    "same": ((3, 9, 7, 5), (3, 3, 5, 6), (1, 1), "SAME", (1, 1), NHWC),
    "full": ((3, 9, 7, 5), (3, 2, 5, 6), (1, 1), ((2, 2), (1, 1)), (1, 1), NHWC),
    "uneven padding": ((2, 8, 9, 3), (3, 3, 3, 4), (1, 1), ((0, 3), (4, 1)), (1, 1), NHWC),
    "negative padding": ((2, 9, 9, 3), (3, 3, 3, 4), (1, 1), ((-1, 2), (3, -1)), (1, 1), NHWC),
    "stride 2": ((3, 9, 8, 4), (3, 3, 4, 6), (2, 2), "SAME", (1, 1), NHWC),
    "strides 3 and 2": ((3, 11, 12, 4), (3, 2, 4, 6), (3, 2), "VALID", (1, 1), NHWC),
    "dilated filter": ((3, 11, 12, 4), (3, 3, 4, 6), (1, 1), "VALID", (2, 3), NHWC),
    "5x5": ((3, 14, 14, 4), (5, 5, 4, 6), (1, 1), "VALID", (1, 1), NHWC),
    "1x1": ((3, 7, 7, 8), (1, 1, 8, 6), (1, 1), "VALID", (1, 1), NHWC),
    "1x1, stride 2": ((3, 7, 7, 8), (1, 1, 8, 6), (2, 2), "VALID", (1, 1), NHWC),
    "window of the image's size": ((3, 4, 4, 8), (4, 4, 8, 6), (1, 1), "VALID", (1, 1), NHWC),
    "channels first": ((3, 5, 9, 8), (6, 5, 3, 3), (1, 1), "VALID", (1, 1), NCHW),
    "one dimension": ((3, 19, 5), (4, 5, 6), (1,), "VALID", (1,), NWC),
    "three dimensions": ((2, 5, 6, 5, 3), (3, 3, 3, 3, 4), (1, 2, 1), "SAME", (1, 1, 1), NDHWC),
    "one dimension, stride 2": ((3, 19, 5), (3, 5, 6), (2,), "SAME", (2,), NWC),
}


@pytest.fixture(scope="module", autouse=True)
def _backend():
    prepare_backend()


def normal(*shape, seed=0, dtype=np.float32):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def equations_of(fn, *args):
    """Returns the equations of a traced function, those of inner jaxprs included."""

    def equations(jaxpr):
        for eqn in jaxpr.eqns:
            yield eqn
            for inner in jax.tree.leaves(
                list(eqn.params.values()), is_leaf=lambda p: hasattr(p, "eqns")
            ):
                if hasattr(inner, "eqns"):
                    yield from equations(inner)

    return list(equations(jax.make_jaxpr(fn)(*args).jaxpr))


def primitives_of(fn, *args):
    return [equation.primitive.name for equation in equations_of(fn, *args)]


def value_and_gradients(fn, *args):
    """`fn` and the gradients of its product with a fixed cotangent, in every argument."""

    def both(*args):
        value, pullback = jax.vjp(fn, *args)
        cotangent = jnp.cos(jnp.arange(value.size, dtype=value.dtype)).reshape(value.shape)
        return value, pullback(cotangent)

    return both, args


def assert_close(actual, expected, tolerance=4e-6):
    """Compares with what XLA makes of the same sums, which it adds up in another order."""
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert (a.shape, a.dtype) == (e.shape, e.dtype)
        scale = np.abs(np.asarray(e, np.float32)).max() + 1e-30
        difference = np.abs(np.asarray(a, np.float32) - np.asarray(e, np.float32)).max()
        assert difference <= tolerance * scale


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_a_convolution_and_its_gradients_equal_those_of_xla(name):
    image, filters, strides, padding, dilation, numbers = CONVOLUTIONS[name]
    conv = functools.partial(
        lax.conv_general_dilated,
        window_strides=strides,
        padding=padding,
        rhs_dilation=dilation,
        dimension_numbers=numbers,
    )
    both, args = value_and_gradients(conv, normal(*image), normal(*filters, seed=1))
    assert_close(jax.jit(lower_for_cpu(both))(*args), jax.jit(both)(*args))


def test_bfloat16_stays_bfloat16():
    conv = functools.partial(
        lax.conv_general_dilated, window_strides=(1, 1), padding="VALID", dimension_numbers=NHWC
    )
    image = jnp.asarray(normal(4, 9, 9, 3), jnp.bfloat16)
    filters = jnp.asarray(normal(3, 3, 3, 5, seed=1), jnp.bfloat16)
    both, args = value_and_gradients(conv, image, filters)
    assert_close(jax.jit(lower_for_cpu(both))(*args), jax.jit(both)(*args), tolerance=1e-2)


def convolve(x, w, **params):
    params = {"window_strides": (1, 1), "padding": "VALID", "dimension_numbers": NHWC} | params
    return lax.conv_general_dilated(x, w, **params)


def filter_gradient(x, w, **params):
    return jax.grad(lambda w: convolve(x, w, **params).sum())(w)


@pytest.mark.parametrize(
    ("image", "filters"), [((4, 9, 9, 8), (1, 1, 8, 5)), ((4, 9, 9, 1), (3, 3, 1, 5))]
)
def test_filter_gradients_of_a_pixel_or_a_channel_are_products(image, filters):
    args = normal(*image), normal(*filters)
    assert primitives_of(filter_gradient, *args).count("conv_general_dilated") == 2
    assert primitives_of(lower_for_cpu(filter_gradient), *args).count("conv_general_dilated") == 1


def dimension_numbers_of(fn, *args):
    """Returns the different ones of the convolutions in a traced function."""
    return {
        equation.params["dimension_numbers"]
        for equation in equations_of(fn, *args)
        if equation.primitive.name == "conv_general_dilated"
    }


@pytest.mark.parametrize(
    ("image", "filters", "params"),
    [
        ((4, 9, 9, 3), (3, 3, 3, 6), {}),
        ((4, 9, 9, 3), (5, 5, 3, 6), {"padding": "SAME"}),
        ((4, 9, 9, 3), (3, 3, 3, 6), {"padding": "SAME", "window_strides": (2, 2)}),
        ((4, 3, 9, 9), (6, 3, 3, 3), {"dimension_numbers": NCHW, "padding": "SAME"}),
        ((4, 19, 5), (3, 5, 6), {"dimension_numbers": NWC, "window_strides": (1,)}),
        ((2, 5, 5, 5, 3), (3, 3, 3, 3, 4), {
            "window_strides": (1, 1, 1), "dimension_numbers": NDHWC, "padding": "SAME",
        }),
    ],
    ids=["3x3", "5x5", "strided", "channels first", "one dimension", "three dimensions"],
)  # fmt: skip
def test_the_convolutions_of_gradients_have_their_channels_last(image, filters, params):
    """XLA:CPU brings others into this form at the top of a program, but not in its loops."""

    def gradients(x, w):
        return jax.grad(lambda x, w: jnp.sum(convolve(x, w, **params) ** 2), (0, 1))(x, w)

    args = normal(*image), normal(*filters)
    rank = len(image)
    of_images = (0, rank - 1, *range(1, rank - 1))
    of_filters = (rank - 1, rank - 2, *range(rank - 2))
    canonical = lax.ConvDimensionNumbers(of_images, of_filters, of_images)
    assert dimension_numbers_of(gradients, *args) != {canonical}
    assert dimension_numbers_of(lower_for_cpu(gradients), *args) == {canonical}


def test_grouped_convolutions_pass_through_untouched():
    gradient = functools.partial(filter_gradient, feature_group_count=2)
    args = normal(4, 9, 9, 4), normal(3, 3, 2, 6)
    assert primitives_of(lower_for_cpu(gradient), *args) == primitives_of(gradient, *args)


# array, window, strides, padding
POOLS = {
    "2x2": ((2, 8, 6, 3), (1, 2, 2, 1), (1, 2, 2, 1), "VALID"),
    "2x2, odd sizes": ((2, 11, 7, 3), (1, 2, 2, 1), (1, 2, 2, 1), "VALID"),
    "2x2, padded": ((2, 11, 7, 3), (1, 2, 2, 1), (1, 2, 2, 1), "SAME"),
    "padded before": ((2, 5, 5, 3), (1, 2, 2, 1), (1, 2, 2, 1), ((0, 0), (1, 0), (1, 0), (0, 0))),
    "overlapping": ((2, 9, 8, 3), (1, 3, 3, 1), (1, 2, 2, 1), "SAME"),
    "stride 1": ((2, 6, 5, 3), (1, 2, 2, 1), (1, 1, 1, 1), "SAME"),
    "gaps": ((2, 9, 9, 3), (1, 2, 2, 1), (1, 3, 3, 1), "VALID"),
    "channels first": ((2, 3, 8, 6), (1, 1, 2, 2), (1, 1, 2, 2), "VALID"),
    "one dimension": ((2, 9, 3), (1, 2, 1), (1, 2, 1), "VALID"),
}


def pool_gradient(x, window, strides, padding):
    def pool(x):
        return lax.reduce_window(x, -jnp.inf, lax.max, window, strides, padding)

    value, pullback = jax.vjp(pool, x)
    return pullback(1 + jnp.arange(value.size, dtype=x.dtype).reshape(value.shape))[0]


@pytest.mark.parametrize("name", POOLS)
def test_the_gradient_of_a_max_pool_goes_where_xla_sends_it(name):
    shape, *window = POOLS[name]
    distinct = normal(*shape)
    tied = np.maximum(distinct.round(), 0)
    special = np.where(distinct < -1, -np.inf, np.where(distinct > 1, np.nan, distinct))
    x = np.concatenate([distinct, tied, np.ones_like(distinct), special])
    gradient = functools.partial(
        pool_gradient, window=window[0], strides=window[1], padding=window[2]
    )
    lowered = lower_for_cpu(gradient)
    assert "select_and_scatter_add" not in primitives_of(lowered, x)
    assert_close(jax.jit(lowered)(x), jax.jit(gradient)(x), tolerance=1e-6)


def test_the_first_of_equal_elements_takes_the_gradient():
    gradient = functools.partial(
        pool_gradient, window=(1, 2, 2, 1), strides=(1, 2, 2, 1), padding="VALID"
    )
    tied = jnp.asarray([[0.0, 7.0], [7.0, 7.0]]).reshape(1, 2, 2, 1)
    assert lower_for_cpu(gradient)(tied).reshape(2, 2).tolist() == [[0.0, 1.0], [0.0, 0.0]]


@pytest.mark.parametrize(("size", "stride"), [(8, 8), (3, 1)], ids=["global", "much overlap"])
def test_other_pools_pass_through_untouched(size, stride):
    gradient = functools.partial(
        pool_gradient, window=(1, size, size, 1), strides=(1, stride, stride, 1), padding="VALID"
    )
    x = normal(2, 8, 8, 3)
    assert primitives_of(lower_for_cpu(gradient), x) == primitives_of(gradient, x)


def loss(params, x):
    x = jax.nn.relu(convolve(x, params["w"]) + params["b"])
    x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    return jnp.mean(x**2)


def parameters():
    return {"w": normal(3, 3, 2, 4, seed=1), "b": normal(4, seed=2)}


def replicas():
    return jax.make_mesh((2,), ("replica",), (AxisType.Auto,), devices=jax.devices()[:2])


@pytest.mark.parametrize("check_vma", [True, False])
def test_it_works_under_shard_map_with_collectives(check_vma):
    mesh = replicas()

    def step(params, x):
        value, gradients = jax.value_and_grad(loss)(params, x)
        return lax.pmean(value, "replica"), lax.pmean(gradients, "replica")

    def sharded(step):
        specs = (PartitionSpec(), PartitionSpec("replica"))
        return jax.jit(
            jax.shard_map(
                step, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(), check_vma=check_vma
            )
        )

    # Enough examples that the filter gradient is a loop over chunks.
    args = parameters(), normal(1024, 13, 13, 2)
    assert "scan" in primitives_of(sharded(lower_for_cpu(step)), *args)
    assert_close(sharded(lower_for_cpu(step))(*args), sharded(step)(*args))


def test_a_shard_map_inside_the_function_is_rewritten():
    mesh = replicas()
    specs = (PartitionSpec(), PartitionSpec("replica"))
    step = jax.shard_map(
        lambda params, x: lax.pmean(jax.grad(loss)(params, x), "replica"),
        mesh=mesh, in_specs=specs, out_specs=PartitionSpec(),
    )  # fmt: skip
    args = parameters(), normal(4, 9, 9, 2)
    assert "select_and_scatter_add" not in primitives_of(lower_for_cpu(step), *args)
    assert_close(jax.jit(lower_for_cpu(step))(*args), jax.jit(step)(*args))


def custom_jvp(fn):
    wrapped = jax.custom_jvp(fn)
    wrapped.defjvp(lambda primals, tangents: (fn(*primals), fn(*tangents)))
    return wrapped


def custom_vjp(fn):
    wrapped = jax.custom_vjp(fn)
    wrapped.defvjp(lambda p, x: (fn(p, x), (p, x)), lambda saved, cotangent: saved)
    return wrapped


WRAPPERS = {
    "jit": jax.jit,
    "remat": lambda fn: lambda p, x: jax.grad(jax.checkpoint(loss))(p, x),
    "scan": lambda fn: (
        lambda p, x: lax.scan(
            lambda c, x: (jax.tree.map(jnp.add, c, fn(p, x)), None), fn(p, x), jnp.stack([x, x])
        )[0]
    ),
    "while": lambda fn: lambda p, x: lax.fori_loop(0, x.shape[0], lambda _, g: fn(g, x), p),
    "cond": lambda fn: lambda p, x: lax.cond(x[0, 0, 0, 0] > 0, fn, lambda p, x: p, p, x),
    "vmap": lambda fn: lambda p, x: jax.vmap(fn, (None, 0))(p, jnp.stack([x, x])),
    "custom_jvp": custom_jvp,
    "custom_vjp": custom_vjp,
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_functions_inside_the_function_are_rewritten(name):
    wrapped = WRAPPERS[name](jax.grad(loss))
    args = parameters(), normal(4, 9, 9, 2)
    assert "select_and_scatter_add" in primitives_of(wrapped, *args)
    assert "select_and_scatter_add" not in primitives_of(lower_for_cpu(wrapped), *args)
    assert_close(jax.jit(lower_for_cpu(wrapped))(*args), jax.jit(wrapped)(*args))


def test_pytrees_flags_and_constants_reach_the_function_as_they_are():
    scale = jnp.asarray(2.0)

    def fn(tree, x, *, training, name):
        assert training is True
        return {name: (tree["a"] * scale, None), "sum": [x.sum()]}

    lowered = jax.jit(lambda tree, x: lower_for_cpu(fn)(tree, x, training=True, name="out"))
    result = lowered({"a": jnp.ones(3)}, np.ones(2, np.float32))
    assert jax.tree.map(float, result["sum"]) == [2.0]
    assert result["out"][0].tolist() == [2.0, 2.0, 2.0]
    assert result["out"][1] is None


def test_a_tracer_of_the_caller_may_be_closed_over():
    def step(scale, params, x):
        return lower_for_cpu(lambda params: scale * loss(params, x))(params)

    expected = 3 * loss(parameters(), normal(4, 9, 9, 2))
    assert_close(jax.jit(step)(3.0, parameters(), normal(4, 9, 9, 2)), expected)


def test_debug_prints_survive(capfd):
    def fn(x):
        jax.debug.print("sum is {}", x.sum())
        return x

    jax.block_until_ready(jax.jit(lower_for_cpu(fn))(jnp.ones(3)))
    jax.effects_barrier()
    assert "sum is 3.0" in capfd.readouterr().out


def test_the_lowered_function_can_be_differentiated():
    args = parameters(), normal(4, 9, 9, 2)
    assert_close(jax.grad(lower_for_cpu(loss))(*args), jax.grad(loss)(*args))
