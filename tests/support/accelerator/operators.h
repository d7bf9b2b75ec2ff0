#pragma once

#include <c10/core/Storage.h>

namespace sim {

void resize_storage(const c10::Storage& storage, size_t nbytes);

}  // namespace sim
