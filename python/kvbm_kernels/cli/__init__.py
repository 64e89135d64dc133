"""What the command ``kvbm-kernels`` is made of. Needs the extra ``cli``; nothing else in the package needs this."""
