"""What the tests are about."""

from decimal import ROUND_HALF_EVEN, Decimal


def total(prices, discount=0):
    """The sum of prices, less a discount in per cent, in whole cents."""
    whole = sum(Decimal(price) for price in prices) * (100 - discount) / 100
    return whole.quantize(Decimal("0.01"), ROUND_HALF_EVEN)


def split(amount, people):
    """Parts of an amount in cents that differ by one cent at most."""
    each, left = divmod(amount, people)
    return [each + 1] * left + [each] * (people - left)
