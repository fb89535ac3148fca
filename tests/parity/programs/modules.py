"""`tf.Module`."""

from __future__ import annotations

from parity.facts import fact


def dense(tf):
    class Dense(tf.Module):
        def __init__(self, inputs, outputs, name=None):
            super().__init__(name=name)
            self.kernel = tf.Variable(tf.ones((inputs, outputs)), name="kernel")
            self.bias = tf.Variable(tf.zeros(outputs), name="bias")
            self.calls = tf.Variable(0, trainable=False, name="calls")

        def __call__(self, x):
            self.calls.assign_add(1)
            return tf.matmul(x, self.kernel) + self.bias

    return Dense


def network(tf):
    class Network(tf.Module):
        def __init__(self):
            super().__init__()
            self.layers = [dense(tf)(2, 3), dense(tf)(3, 1)]
            self.extra = {"scale": tf.Variable(2.0, name="scale")}

        def __call__(self, x):
            for layer in self.layers:
                x = layer(x)
            return x * self.extra["scale"]

    return Network()


@fact
def variables_are_found_in_lists_and_dictionaries(tf):
    module = network(tf)
    return [len(module.variables), len(module.trainable_variables)]


@fact
def untrainable_variables_are_told_apart(tf):
    return [v.name for v in network(tf).non_trainable_variables]


@fact
def variables_come_in_the_order_of_attribute_names(tf):
    return [v.shape for v in network(tf).variables]


@fact
def submodules_are_found(tf):
    return [type(each).__name__ for each in network(tf).submodules]


@fact
def a_module_is_named_after_its_class(tf):
    return [dense(tf)(1, 1).name, dense(tf)(1, 1, name="mine").name]


@fact
def a_module_is_called(tf):
    module = network(tf)
    return [module(tf.constant([[1.0, 2.0]])), module.layers[0].calls.numpy()]


@fact
def a_module_is_trained(tf):
    module = network(tf)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(module(tf.constant([[1.0, 2.0]])))
    gradients = tape.gradient(loss, module.trainable_variables)
    for variable, gradient in zip(module.trainable_variables, gradients, strict=True):
        variable.assign_sub(0.1 * gradient)
    return [v.numpy() for v in module.trainable_variables]


@fact
def a_variable_in_two_places_is_listed_once(tf):
    class Shared(tf.Module):
        def __init__(self):
            self.a = tf.Variable(1.0)
            self.b = self.a

    return len(Shared().variables)


@fact
def a_module_makes_its_variables_in_the_first_call(tf):
    class Lazy(tf.Module):
        kernel = None

        @tf.function
        def __call__(self, x):
            if self.kernel is None:
                self.kernel = tf.Variable(tf.ones((x.shape[-1], 2)))
            return tf.matmul(x, self.kernel)

    module = Lazy()
    first = module(tf.constant([[1.0, 2.0, 3.0]]))
    return [first, module(tf.constant([[1.0, 1.0, 1.0]])), module.variables[0].shape]


@fact
def a_module_under_a_strategy_has_mirrored_variables(tf, two):
    with two.scope():
        module = dense(tf)(2, 1)
    return [two.extended.variable_created_in_scope(v) for v in module.variables]


@fact
def names_are_scoped_by_the_module(tf):
    class Scoped(tf.Module):
        def __init__(self):
            super().__init__(name="outer")
            with self.name_scope:
                self.v = tf.Variable(1.0, name="inner")

    return Scoped().v.name


@fact
def a_decorated_method_names_its_variables(tf):
    class Scoped(tf.Module):
        @tf.Module.with_name_scope
        def __call__(self):
            return tf.Variable(1.0, name="inner").name

    return Scoped(name="outer")()
