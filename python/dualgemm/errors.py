"""What can go wrong. Messages are those of the ``dualgemm`` command: the tensor or argument, the rule, the value found
and what would be valid."""


class Error(Exception):
    """Base of every exception of this package."""


class CheckpointError(Error, ValueError):
    """A checkpoint's names or contents break a rule."""


class CheckpointFileError(CheckpointError, OSError):
    """A file that is not there, cannot be read, or is of no known kind."""


class OperandError(Error, ValueError):
    """An array or a number that breaks a rule of its format or of the operation."""


class UnsupportedError(Error, NotImplementedError):
    """Valid, but not possible with this build or on this machine."""


class ArgumentError(Error, ValueError):
    """An argument that cannot be read, such as a name that is unknown."""
