"""The recipe of the noise that samples tokens, as numbers that every implementation of it uses.

The token of a row is the argmax of logit / temperature + g over the tokens that its filters keep (the Gumbel-max rule),
where g is Gumbel noise that depends on the row's key and the token's id alone:

    x = id * ID_STEP + low                                     # 32 bits, as all lines up to v
    x = (x ^ x >> 16) * FIRST_FACTOR
    x = (x ^ x >> 15 ^ high) * SECOND_FACTOR
    x = x ^ x >> 16
    v = min((float32(x) + 0.5) * 2^-32, LARGEST_FRACTION)      # uniform in (0, 1)
    g = -log(-log(1 - v))                                      # float32

The noise is large where v is small, so it is v and not 1 - v that is rounded to a float32: the noise of a token that
can win has all 32 bits of x. It lies between -2.9 and 22.9. A token further than 26 below the largest scaled logit
cannot win.

Source: integer mixing in two rounds as in MurmurHash3 (Appleby), with the factors of lowbias32 (Wellons 2018).
"""

from __future__ import annotations

ID_STEP = 0x9E3779B1
FIRST_FACTOR = 0x7FEB352D
SECOND_FACTOR = 0x846CA68B
LARGEST_FRACTION = 1.0 - 2.0**-24
