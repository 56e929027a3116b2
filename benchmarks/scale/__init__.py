"""What lockstep sends beside torch, counted on 2 to 32 ranks: how it grows with their number."""
