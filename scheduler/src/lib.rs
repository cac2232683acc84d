//! What a Shoal peer does next: pure decisions, and the simulator that drives them.
