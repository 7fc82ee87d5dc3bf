"""Building blocks of the decoder, one file a block; each describes its parameters and is pure once arrays are bound."""
