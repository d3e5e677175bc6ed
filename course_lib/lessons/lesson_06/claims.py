"""Claims that lesson 06 tests."""

from functools import partial

from course_lib.teaching.claims import read_claims, what_you_may_have_read

#: Claims that learners may have read.
CLAIMS = read_claims(__file__, "claims")
#: Claims found only in the teaching documents from which the course was developed.
OLDER_CLAIMS = read_claims(__file__, "older_claims")
#: Function that returns their table, with the measured value of each.
older_claims = partial(what_you_may_have_read, OLDER_CLAIMS)
