"""exp, SiLU and GELU of float32 by operations that every processor rounds alike.

Sums, products, quotients and square roots are correctly rounded everywhere, library functions are
not. kernels/device/elementary.cuh does the same steps, so a GPU has the same bits.
"""

import numpy as np

F32, I32 = np.float32, np.int32

# e^r on |r| <= ln(2) / 2, lowest power first: a minimax fit, relative error 2e-9.
EXP = np.array([
    1.0, 1.0, 0.4999999403953552, 0.16666431725025177, 0.04166800156235695,
    0.008374173194169998, 0.0013843632768839598,
], F32)  # fmt: skip
LOG2E, MAGIC = F32(1.4426950408889634), F32(1.5 * 2**23)  # adding it rounds to an integer
# ln(2) in two parts of 15 and 16 bits, whose products with an exponent are exact.
LN2_HIGH, LN2_LOW = F32(0.693145751953125), F32(1.4286197256296873e-06)
EXP_LEAST, EXP_MOST = F32(-80), F32(87)

# erf(x / sqrt 2) = x P(x^2) / Q(x^2) on |x| <= 5.6, lowest power first: a minimax fit, error
# 2e-8. All coefficients are positive, so nothing cancels.
ERF_P = np.array([
    0.7978844431234919, 0.06875224230332741, 0.009414518928110866, 0.0003477014801373833,
    1.271304098279325e-05, 4.4290480307976735e-08,
], F32)  # fmt: skip
ERF_Q = np.array([
    1.0, 0.2528338703344978, 0.028940093694292734, 0.00191297836059386, 7.510186251903776e-05,
    1.1802089579448173e-06,
], F32)  # fmt: skip
ERF_LIMIT = F32(6)  # there the quotient is above 1 by more than its roundings


def exp(x: np.ndarray) -> np.ndarray:
    """e^x of float32, within 1.5 ulp; that of -80 or 87 beyond them."""
    near = np.fmin(np.fmax(x, EXP_LEAST), EXP_MOST)
    shifted = near * LOG2E + MAGIC
    whole = shifted - MAGIC
    rest = (near - whole * LN2_HIGH) - whole * LN2_LOW
    # The integer lies in the low bits of `shifted`.
    return (_polynomial(EXP, rest).view(I32) + (shifted.view(I32) << I32(23))).view(F32)


def silu(x: np.ndarray) -> np.ndarray:
    """x * (1 / (1 + e^-x)) of float32, within 3 ulp; -0 below -87; NaN of NaN and of -infinity."""
    with np.errstate(all="ignore"):
        return np.where(x < -EXP_MOST, x * F32(0), x) * (F32(1) / (F32(1) + exp(-x)))


def gelu(x: np.ndarray) -> np.ndarray:
    """x / 2 * (1 + erf(x / sqrt 2)) of float32; NaN of NaN and of -infinity.

    The error is below 5 * 2^-24 * |x|: the sum cancels where x is negative and large.
    """
    with np.errstate(all="ignore"):
        near = np.fmin(np.fmax(x, -ERF_LIMIT), ERF_LIMIT)
        square = near * near
        inverse = F32(1) / _polynomial(ERF_Q, square)
        erf = (near * _polynomial(ERF_P, square)) * inverse
        erf = np.fmin(np.fmax(erf, F32(-1)), F32(1))
        return (x * F32(0.5)) * (F32(1) + erf)


def _polynomial(coefficients: np.ndarray, x: np.ndarray) -> np.ndarray:
    """A polynomial, lowest power first, by Horner's rule."""
    value = coefficients[-1] * x + coefficients[-2]
    for coefficient in coefficients[-3::-1]:
        value = value * x + coefficient
    return value
