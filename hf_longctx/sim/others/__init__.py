"""Plans that other systems would make for the same lengths, for comparison with ours."""
