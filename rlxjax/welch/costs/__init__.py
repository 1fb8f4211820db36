"""What the strategies of Welch peaks cost by the reference's constants: estimates, breakdown, picks, whole tables."""
