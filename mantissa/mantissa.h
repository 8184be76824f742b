#pragma once
// Everything public.
#include "autograd/autocast.h"
#include "autograd/gradcheck.h"
#include "autograd/graph.h"
#include "autograd/ops.h"
#include "core/precision.h"
#include "nn/init.h"
#include "nn/layers.h"
#include "nn/models.h"
#include "optim/loss_scaler.h"
#include "optim/optimizer.h"
