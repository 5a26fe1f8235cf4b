// SPDX-License-Identifier: MIT
//
// The state of the loss's scale: four floats, which misc/loss_scale.cu writes and misc/optimizer.cu obeys.
#pragma once

#include "common/device.cuh"

constexpr int SCALE = 0;    // what the next step's loss is multiplied by
constexpr int UNSCALE = 1;  // what this step's gradients are multiplied by; 0: the step is skipped
constexpr int GOOD = 2;     // steps that went well since the scale changed
constexpr int SKIPPED = 3;  // steps skipped in all
