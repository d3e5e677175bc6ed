"""Claims that lesson 06 tests."""

from functools import partial

from course_lib.teaching import claims

#: Claims that learners may have read.
CLAIMS = claims.read_claims(__file__, "claims")
#: Function that returns their table, with the measured value of each.
claims_table = partial(claims.claims_table, CLAIMS)
