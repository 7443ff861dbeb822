"""Training of EAGLE-3 drafters: text by the target, packed passes, the loop, export."""
