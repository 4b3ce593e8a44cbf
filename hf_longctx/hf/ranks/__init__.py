"""Agreement among ranks, what a launcher tells them, and which of them are lost."""
