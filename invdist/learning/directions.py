"""The names of the directions an update may take: shared by training and by reports, which know nothing of torch."""


def direction_name(multiplier: float) -> str:
    """`direct`, `pass` or `inverse` for a multiplier of the update vector, by its sign."""
    return "pass" if multiplier == 0 else "direct" if multiplier < 0 else "inverse"
