"""Claims that lesson 06 tests."""

from functools import partial

from course_lib.teaching import claims

#: Claims that learners may have read.
CLAIMS = claims.read_claims(__file__, "claims")
#: Function that returns a table of `CLAIMS`. Its arguments are the measured values.
claims_table = partial(claims.claims_table, CLAIMS)
