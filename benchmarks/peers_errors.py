"""What can go wrong with a peer."""


class PeerError(Exception):
    """An engine that cannot be measured; the text says why."""


class FigureError(PeerError):
    """One figure that an engine cannot be measured on. Its other figures can be."""
