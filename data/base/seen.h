// What earlier processes of this user have seen: a file each in $XDG_CACHE_HOME/unpad, or
// ~/.cache/unpad. Losing them does no harm.
#ifndef UNPAD_SEEN_H
#define UNPAD_SEEN_H

#include "error.h"

// Has seen_add been called with the same text? False as well when that is not known.
bool seen_before(const char *text);

// A failure, such as a read-only home directory, is not reported: the text stays unseen.
void seen_add(const char *text);

#endif
