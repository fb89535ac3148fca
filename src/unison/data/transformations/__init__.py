"""Plans made of plans: what `Dataset`'s methods do to elements."""
