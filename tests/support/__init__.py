"""Models, harnesses, oracles and fakes: the only package that tests import."""
