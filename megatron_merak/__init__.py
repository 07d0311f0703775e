"""megatron_merak: data x tensor x pipeline parallel training of transformers."""
