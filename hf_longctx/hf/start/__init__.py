"""Start of a run: arguments, versions and models checked, memory and stages set up."""
