"""What a run takes, before it is created: estimated from its settings, refused where it cannot fit."""
