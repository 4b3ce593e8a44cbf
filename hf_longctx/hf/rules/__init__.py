"""Why a run is refused. No side effect, no collective."""
