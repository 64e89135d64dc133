"""What the command ``kvbm-kernels`` is made of. Needs the extra ``cli``, but for the report; nothing else in the
package needs this.
"""
