"""Shell scripts, followed without running them: what is known of their variables at each command."""
