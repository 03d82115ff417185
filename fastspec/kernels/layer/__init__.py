"""Operations between a layer's products: norms, and rotary embedding together with the write to the cache."""
