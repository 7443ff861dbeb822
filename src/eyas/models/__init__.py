"""Networks: targets and the EAGLE-3 drafter, and the registry that builds and loads them."""
