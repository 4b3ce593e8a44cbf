"""Plans that other systems would make with the same lengths, for comparison with ours."""
