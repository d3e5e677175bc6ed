"""Claims that lesson 04 tests."""

from course_lib.teaching.claims import read_claims

#: Claims that learners may have read; each says whether it was tested here.
CLAIMS = read_claims(__file__, "claims")
#: Claims found only in the teaching documents from which the course was developed.
OLDER_CLAIMS = read_claims(__file__, "older_claims")
