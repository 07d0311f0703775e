"""What a script asks for: transformers' arguments and this library's, read and checked."""
