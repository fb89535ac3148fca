"""Features of Keras' models and loops, for programs to which Keras comes in either form."""
