"""Arguments of a script: transformers' and this library's, read and checked."""
