"""What this machine reaches of its figures, measured for plans: products, attention, passes, links."""
