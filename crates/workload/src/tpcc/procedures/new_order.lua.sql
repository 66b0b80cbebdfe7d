CREATE OR REPLACE PROCEDURE tpcc_new_order(
    w INTEGER, d INTEGER, c INTEGER, items TEXT, suppliers TEXT, quantities TEXT)
RETURNS TABLE (
    order_number INTEGER, last_name TEXT, credit TEXT, discount INTEGER,
    warehouse_tax INTEGER, district_tax INTEGER, total_cents BIGINT)
LANGUAGE lua AS $$
    local item, supplier, quantity =
        string.split(items, ","), string.split(suppliers, ","), string.split(quantities, ",")
    local all_local = 1
    for i = 1, #item do
        item[i], supplier[i], quantity[i] = tonumber(item[i]), tonumber(supplier[i]), tonumber(quantity[i])
        if supplier[i] ~= w then all_local = 0 end
    end

    local district = db.query("UPDATE district SET d_next_o_id = d_next_o_id + 1 \
        WHERE d_w_id = $1 AND d_id = $2 RETURNING d_next_o_id - 1 AS number, d_tax", w, d)[1]
    local customer = db.query("SELECT c_discount, c_last, c_credit, w_tax FROM warehouse, customer \
        WHERE w_id = $1 AND c_w_id = $1 AND c_d_id = $2 AND c_id = $3", w, d, c)[1]
    local number = district.number
    db.exec("INSERT INTO orders (o_w_id, o_d_id, o_id, o_c_id, o_entry_d, o_ol_cnt, o_all_local) \
        VALUES ($1, $2, $3, $4, CURRENT_TIMESTAMP, $5, $6)", w, d, number, c, #item, all_local)
    db.exec("INSERT INTO new_order (no_w_id, no_d_id, no_o_id) VALUES ($1, $2, $3)", w, d, number)

    local sum_cents = 0
    for i = 1, #item do
        local known = db.query("SELECT i_price, i_name, i_data FROM item WHERE i_id = $1", item[i])[1]
        if known == nil then db.abort("Item number is not valid") end
        local stock = db.query("{STOCK}",
            quantity[i], if supplier[i] == w then 0 else 1, supplier[i], item[i], d)[1]
        local amount_cents = quantity[i] * known.i_price
        db.exec("INSERT INTO order_line (ol_w_id, ol_d_id, ol_o_id, ol_number, ol_i_id, ol_supply_w_id, \
            ol_quantity, ol_amount, ol_dist_info) VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9)",
            w, d, number, i, item[i], supplier[i], quantity[i], amount_cents, stock.dist_info)
        sum_cents += amount_cents
    end
    return {
        order_number = number, last_name = customer.c_last, credit = customer.c_credit,
        discount = customer.c_discount, warehouse_tax = customer.w_tax, district_tax = district.d_tax,
        total_cents = sum_cents * (10000 - customer.c_discount) * (10000 + customer.w_tax + district.d_tax)
            // 100000000,
    }
$$
